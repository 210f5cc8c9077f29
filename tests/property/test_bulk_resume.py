"""Bulk jobs: equal windows and files in every run, wherever a run is cut short."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.batch.lines import SeenIds
from cluster.classification.classify import ClassifyTask
from cluster.tools.bulk.output import Journal, part_name
from cluster.tools.bulk.records import (
    DUPLICATE,
    InputRecord,
    InputRow,
    Reject,
    RowAnswer,
    WindowLimits,
    split_chunks,
    split_windows,
)
from contracts.errors import ConfigError, JobError
from tests.support.bulk_support import (
    EchoRouter,
    Killed,
    bulk_job,
    final_files,
    json_lines,
    parts,
    rejected,
    rows_of,
    run_job,
)

IN_FLIGHT = 4
ANSWERABLE = 28  # of `some_records`, those sent to the router
TORN = st.fixed_dictionaries(
    {name: st.booleans() for name in ("journal", "ledger.jsonl", "rejected.jsonl")}
)


def some_records() -> list[InputRecord]:
    """Return records with a bad row, a refused one and a duplicate id."""
    records = rows_of([f"text {n * 37 % 40}" for n in range(30)])
    records[4] = Reject("in:4", "in:4", "bad")
    records[9] = InputRow("id-9", "in:9", "p", "refuse this")
    records[21] = InputRow("id-2", "in:21", "", "an id again")
    return records


@contextmanager
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bulk-") as folder:
        yield Path(folder)


@functools.cache
def files_of_whole_run() -> dict[str, bytes]:
    with temporary() as folder:
        run_job(folder, some_records(), EchoRouter(), in_flight_rows=IN_FLIGHT)
        return dict(final_files(folder))


class Crash:
    """Context that raises Killed at the n-th disk operation."""

    STEPS = ((os, "fsync"), (os, "truncate"), (Path, "replace"), (Path, "unlink"))

    def __init__(self, at: int) -> None:
        self._left = at

    def __enter__(self) -> Crash:
        self._patch = pytest.MonkeyPatch()
        for owner, name in self.STEPS:
            self._patch.setattr(owner, name, self._counted(getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _counted(self, step: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **named: object) -> object:
            self._left -= 1
            if self._left < 0:
                raise Killed
            return step(*arguments, **named)

        return counted


def run_killed(
    folder: Path,
    records: list[InputRecord],
    *,
    step: int | None = None,
    row: int | None = None,
    router: EchoRouter | None = None,
) -> bool:
    """Run until a disk step or a row at the router; return whether the run completed."""
    router = router or EchoRouter()

    def on_rows(requested: int) -> None:
        if row is not None and requested > row:
            raise Killed

    router.on_rows = on_rows
    try:
        if step is None:
            run_job(folder, records, router, in_flight_rows=IN_FLIGHT)
        else:
            with Crash(step):
                run_job(folder, records, router, in_flight_rows=IN_FLIGHT)
    except Killed:
        return False
    return True


def test_output_keeps_the_order_of_the_input() -> None:
    records = some_records()
    with temporary() as folder:
        run_job(folder, records, EchoRouter(), in_flight_rows=IN_FLIGHT)
        expected = [r.id for r in records if isinstance(r, InputRow)]
        expected.remove("id-9")
        del expected[expected.index("id-2", 3)]
        assert [row["id"] for row in parts(folder)] == expected
        assert [(row["id"], row["place"]) for row in rejected(folder)] == [
            ("in:4", "in:4"),
            ("id-9", "in:9"),
            ("id-2", "in:21"),
        ]
        lines = json_lines(folder / "ledger.jsonl")
        assert sum(line["rows_ok"] for line in lines) == 27
        assert sum(line["rows_rejected"] for line in lines) == 3


@pytest.mark.long
def test_run_killed_at_any_disk_step_repeats_at_most_rows_in_flight() -> None:
    records, expected = some_records(), files_of_whole_run()
    for step in range(1000):
        with temporary() as folder:
            router = EchoRouter()
            complete = run_killed(folder, records, step=step, router=router)
            run_job(folder, records, router, in_flight_rows=IN_FLIGHT)
            assert dict(final_files(folder)) == expected, step
            assert len(router.requested) <= ANSWERABLE + IN_FLIGHT, step
            ledger = json_lines(folder / "ledger.jsonl")
            assert sum(line["rows_sent_again"] for line in ledger) <= IN_FLIGHT, step
        if complete:
            break
    assert complete
    assert step > 20


@pytest.mark.long
@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40), TORN), max_size=4))
def test_repeated_kills_and_torn_files_end_with_same_output(
    kills: list[tuple[int, int, dict[str, bool]]],
) -> None:
    """Which journals a kill leaves depends on timing, so what is torn is drawn beforehand."""
    records, expected = some_records(), files_of_whole_run()
    with temporary() as folder:
        for row, torn_bytes, torn in kills:
            run_killed(folder, records, row=row)
            for path in sorted(folder.glob("*.jsonl")):
                if torn.get(path.name.partition("-")[0], False):
                    size = path.stat().st_size
                    if path.name == "rejected.jsonl":
                        path.write_bytes(path.read_bytes() + b"x" * torn_bytes)  # not in the ledger
                    else:
                        os.truncate(path, max(0, size - torn_bytes))
        run_job(folder, records, EchoRouter(), in_flight_rows=IN_FLIGHT)
        assert dict(final_files(folder)) == expected


def test_window_after_torn_ledger_line_stays_committed(tmp_path: Path) -> None:
    """A line appended to an incomplete line would be lost with it."""
    records = some_records()
    run_job(tmp_path, records, EchoRouter(), in_flight_rows=IN_FLIGHT)
    ledger = tmp_path / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    for torn_bytes in (1, len(lines[-1]) // 2, len(lines[-1]) - 1, len(lines[-1]) + 1):
        os.truncate(ledger, ledger.stat().st_size - torn_bytes)
        run_job(tmp_path, records, EchoRouter(), in_flight_rows=IN_FLIGHT)
        assert [line["window"] for line in json_lines(ledger)] == list(range(len(lines)))
    again = EchoRouter()
    run_job(tmp_path, records, again, in_flight_rows=IN_FLIGHT)
    assert not again.requested


def test_answers_after_torn_journal_line_survive_next_run(tmp_path: Path) -> None:
    (window,) = split_windows(iter(rows_of(["a", "b", "c"])), WindowLimits(rows=3), ids=True)
    path, answer = tmp_path / "journal", RowAnswer([0.5, 0.5], 1, 0)
    for row in range(3):
        journal = Journal(path, window)
        journal.add([(row, answer), (row, answer)])
        journal.close()
        os.truncate(path, path.stat().st_size - 1)
    last = Journal(path, window)
    assert last.answers.keys() == {0, 1, 2}
    last.close()


def test_changed_input_and_missing_part_are_refused(tmp_path: Path) -> None:
    records = rows_of([f"text {n}" for n in range(30)])
    run_killed(tmp_path, records, row=18)
    for changed in (3, 16):  # in a committed window, in an open one
        other = list(records)
        other[changed] = InputRow(f"id-{changed}", f"in:{changed}", "", "something else")
        with pytest.raises(JobError, match="the input has changed since this job began"):
            run_job(tmp_path, other, EchoRouter())
    run_job(tmp_path, records, EchoRouter())
    assert len(parts(tmp_path)) == 30
    (tmp_path / part_name(1)).unlink()
    with pytest.raises(ConfigError, match=r"part-00001.jsonl is in the ledger"):
        run_job(tmp_path, records, EchoRouter())


ids = st.one_of(st.integers(0, 9), st.sampled_from("0123abc"))
rows = st.builds(
    InputRow, ids, st.just("in:1"), st.sampled_from(["", "p ", "q "]), st.text("xyz", max_size=4)
)
rejects = st.builds(Reject, ids, st.just("in:2"), st.just("bad"))
inputs = st.lists(st.one_of(rows, rejects), max_size=40)
limits = st.builds(WindowLimits, rows=st.integers(1, 9), characters=st.integers(1, 40))
TASK = ClassifyTask(labels=("a", "b"), template="{prefix}{text}")


@given(inputs, limits)
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


@given(inputs, limits)
def test_window_ends_only_when_full(given_: list[InputRecord], limits: WindowLimits) -> None:
    windows = list(split_windows(given_, limits, ids=False))
    for window in windows[:-1]:
        characters = sum(len(row.prefix) + len(row.text) for row in window.rows)
        assert window.records == limits.rows or characters >= limits.characters
    assert all(window.records <= limits.rows for window in windows)


@given(inputs, inputs, limits)
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
    job = bulk_job(Path("out"), labels=TASK.labels, template=TASK.template)
    chunks = list(split_chunks(window, missing, job.prompt, size, 1000))
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
    assert all(seen.add(range(10_000)))
    assert seen.num_bytes == 8 * 10_000
