"""Which rows the speed of prefill-only work is measured on."""

import json
from pathlib import Path

import pytest

from benchmarks.support.prefill_rows import Pick, Rows, read


def encode(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prefixes of 10, 20, 30 and 40 bytes with three rows each; a set without prefixes."""
    folder = tmp_path / "classification"
    folder.mkdir()
    rows = [
        {"prefix": letter * size, "text": f"text {n}", "labels": ["A", "B"], "label": 0}
        for n in range(3)
        for letter, size in zip("dbca", (40, 20, 30, 10), strict=True)
    ]
    plain = [{"text": f"row {n}", "labels": ["x", "y"], "label": 1} for n in range(9)]
    for name, lines in (("shared", rows), ("plain", plain)):
        text = "\n".join(map(json.dumps, lines))
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


def test_prefixes_come_whole_their_rows_together_and_none_is_cut(data: Path) -> None:
    middle = read(Pick("shared.jsonl", "{}!", groups=2), data, encode, 1000)
    assert middle is not None
    texts = [bytes(ids).decode() for ids in middle.token_ids]
    assert texts == [f"{'b' * 20}text {n}!" for n in range(3)] + [
        f"{'c' * 30}text {n}!" for n in range(3)
    ]
    assert middle.candidates == [ord("A"), ord("B")]
    short = read(Pick("shared.jsonl", "{}", groups=2, shortest=True), data, encode, 28)
    assert short is not None
    assert {len(ids) for ids in short.token_ids} == {16, 26}
    assert read(Pick("shared.jsonl", "{}", groups=2), data, encode, 16) is None


def test_a_sample_of_rows_without_prefixes_is_the_same_every_time(data: Path) -> None:
    pick = Pick("plain.jsonl", "{}", rows=4)
    first, second = (read(pick, data, encode, 100) for _ in range(2))
    assert first == second
    assert first is not None
    assert len({tuple(ids) for ids in first.token_ids}) == 4


def test_a_token_in_front_makes_rows_of_a_round_new_or_each_of_them() -> None:
    rows = Rows([[1, 2], [1, 2, 3], [1]], [7])
    together, apart = rows.behind(5, apart=False), rows.behind(5, apart=True)
    assert len({ids[0] for ids in together.token_ids}) == 1
    assert len({ids[0] for ids in apart.token_ids}) == 3
    assert together.token_ids[0][0] != rows.behind(6, apart=False).token_ids[0][0]
    for more in (together, apart):
        assert [ids[1:] for ids in more.token_ids] == rows.token_ids
