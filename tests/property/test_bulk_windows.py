"""Windows are identical in every run, duplicates are rejected, common prefixes are neighbours."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.classification.classify import ClassifyTask
from cluster.tools.bulk.records import InputRecord, InputRow, Reject
from cluster.tools.bulk.windows import DUPLICATE, SeenIds, WindowLimits, split_chunks, split_windows

ids = st.one_of(st.integers(0, 9), st.sampled_from("0123abc"))
rows = st.builds(
    InputRow, ids, st.just("in:1"), st.sampled_from(["", "p ", "q "]), st.text("xyz", max_size=4)
)
rejects = st.builds(Reject, ids, st.just("in:2"), st.just("bad"))
records = st.lists(st.one_of(rows, rejects), max_size=40)
limits = st.builds(WindowLimits, rows=st.integers(1, 9), characters=st.integers(1, 40))
TASK = ClassifyTask(labels=("a", "b"), template="{prefix}{text}")


@given(records, limits)
def test_windows_partition_records_and_reject_duplicate_ids(
    given_: list[InputRecord], limits: WindowLimits
) -> None:
    windows = list(split_windows(given_, limits, ids=True))
    assert [window.number for window in windows] == list(range(len(windows)))
    kept = [row for window in windows for row in window.rows]
    first: dict[object, InputRow] = {}
    for record in given_:
        if isinstance(record, InputRow):
            first.setdefault((type(record.id), record.id), record)
    assert kept == list(first.values())
    turned_away = [reject for window in windows for reject in window.rejects]
    assert len(kept) + len(turned_away) == len(given_)
    bad = [reject for reject in turned_away if reject.reason != DUPLICATE]
    assert bad == [record for record in given_ if isinstance(record, Reject)]


@given(records, limits)
def test_window_ends_only_when_full(given_: list[InputRecord], limits: WindowLimits) -> None:
    windows = list(split_windows(given_, limits, ids=False))
    for window in windows[:-1]:
        characters = sum(len(row.prefix) + len(row.text) for row in window.rows)
        assert window.records == limits.rows or characters >= limits.characters
    assert all(window.records <= limits.rows for window in windows)


@given(records, records, limits)
def test_digest_distinguishes_inputs(
    one: list[InputRecord], other: list[InputRecord], limits: WindowLimits
) -> None:
    digests = [
        [window.digest for window in split_windows(each, limits, ids=True)] for each in (one, other)
    ]
    assert (digests[0] == digests[1]) == (one == other)


@given(st.lists(rows, min_size=1, max_size=30), st.integers(1, 7), st.data())
def test_chunks_contain_missing_rows_once_sorted_by_prompt(
    given_: list[InputRow], size: int, data: st.DataObject
) -> None:
    (window,) = split_windows(given_, WindowLimits(rows=100), ids=False)
    missing = data.draw(st.sets(st.integers(0, len(given_) - 1)))
    chunks = list(split_chunks(window, missing, TASK, size, 1000))
    sent = [row for chunk in chunks for row in chunk]
    assert sorted(sent) == sorted(missing)
    prompts = [window.rows[row].prefix + window.rows[row].text for row in sent]
    assert prompts == sorted(prompts)
    assert all(len(chunk) == size for chunk in chunks[:-1])


@given(st.lists(st.lists(ids, max_size=20), max_size=8))
def test_id_is_new_only_once(batches: list[list[int | str]]) -> None:
    seen, known = SeenIds(), set()
    for batch in batches:
        expected = []
        for row_id in batch:
            key = (type(row_id), row_id)
            expected.append(key not in known)
            known.add(key)
        assert seen.add(batch) == expected


def test_seen_ids_need_eight_bytes_each() -> None:
    seen = SeenIds()
    for start in range(0, 100_000, 1000):
        assert all(seen.add(range(start, start + 1000)))
    assert seen.num_bytes == 8 * 100_000
    assert not any(seen.add(range(100_000)))
