"""Rows from files: a bad row affects no other, in every format."""

import bz2
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.batch.lines import split_lines
from cluster.tools.bulk import readers
from cluster.tools.bulk.output import JOB, LEDGER
from cluster.tools.bulk.records import Fields, InputRecord, InputRow, Reject
from cluster.tools.bulk.sources import ReadProgress, find_sources, read_all
from contracts.errors import ConfigError, JobError
from tests.support.one_line_errors import one_line_error

FIELDS = Fields(id="id")


def read(*inputs: Path | str, fields: Fields = FIELDS) -> list[InputRecord]:
    sources = find_sources([str(path) for path in inputs])
    watch = ReadProgress(sum(source.file.size_bytes for source in sources))
    records = list(read_all(sources, fields, watch))
    assert watch.fraction == 1.0
    return records


def outcome(record: InputRecord) -> tuple[Any, str]:
    return record.id, record.text if isinstance(record, InputRow) else record.reason


def write(path: Path, body: bytes | str) -> Path:
    path.write_bytes(body if isinstance(body, bytes) else body.encode())
    return path


def test_bad_line_is_rejected_alone(tmp_path: Path) -> None:
    lines = [
        b'{"id": 1, "text": "first", "prefix": "p"}',
        b"{broken",
        b"",
        b'{"id": 2}',
        b'{"id": 3, "text": null}',
        b'{"id": 4, "text": 7}',
        b'{"id": 5, "text": " \\n"}',
        b'{"id": 6, "text": "caf\xe9"}',
        b'{"id": 7, "text": "half a pair \\ud800"}',
        b"[1]",
        b'{"text": "no id"}',
        b'{"id": 1.5, "text": "id of a wrong type"}',
        b'{"id": "", "text": "empty id"}',
        b'{"id": true, "text": "boolean id"}',
        b"[" * 5000,
        b'{"id": 8, "text": "a prefix of a wrong type", "prefix": 1}',
        b'{"id": 123456789012345678901234567890, "text": "a large id"}',
        b'{"id": 9, "text": "first", "text": "second"}',
        b'{"id": 9007199254740993, "text": "its \\"text\\" is", "a": {"text": "text"}}',
        '{"id": "ü", "text": "last", "prefix": null}'.encode(),
    ]
    path = write(tmp_path / "rows.jsonl", b"\r\n".join(lines))
    records = read(path)
    assert len(records) == len(lines)
    assert [r for r in records if isinstance(r, InputRow)] == [
        InputRow(1, f"{path}:1", "p", "first"),
        InputRow(9007199254740993, f"{path}:19", "", 'its "text" is'),
        InputRow("ü", f"{path}:20", "", "last"),
    ]
    reasons = {int(r.place.rpartition(":")[2]): r.reason for r in records if isinstance(r, Reject)}
    expected = {
        2: "not valid JSON", 3: "empty line", 4: "text: missing", 5: "text: missing",
        6: "text: expected a string, got int", 7: "text: empty", 8: "not UTF-8",
        9: "not valid JSON", 10: "expected a JSON object, got list", 11: "id: missing",
        12: "id: expected a string or an integer, got float", 13: "id: empty",
        14: "id: expected a string or an integer, got bool", 15: "nested too deeply",
        16: "prefix: expected a string, got int", 17: "id: an integer beyond 64 bits",
        18: "text: occurs twice",
    }  # fmt: skip
    assert reasons.keys() == expected.keys()
    for number, words in expected.items():
        assert words in reasons[number], (number, reasons[number])
    assert records[5].id == 4  # a valid id is kept
    assert records[1].id == f"{path}:2"


def test_row_without_id_is_named_by_place(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.ndjson", '{"text": "a"}\n{"text": "b"}\n')
    assert [record.id for record in read(path, fields=Fields())] == [f"{path}:1", f"{path}:2"]


def one_by_one(blocks: list[bytes]) -> Callable[[int], bytes]:
    """Return a `read` that returns one block a call."""
    left = iter(blocks)
    return lambda _: next(left, b"")


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=8))
def test_lines_are_independent_of_block_boundaries(lines: list[bytes]) -> None:
    body = b"\n".join(lines)
    if body.startswith(b"\xef\xbb\xbf"):
        return
    expected = body.split(b"\n") if body else []
    if expected and not expected[-1]:
        expected.pop()
    for size in (1, 3, 1000):
        blocks = [body[at : at + size] for at in range(0, len(body), size)]
        assert list(split_lines(one_by_one(blocks))) == expected


def test_too_long_line_is_rejected_and_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(readers, "READ_BYTES", 300)
    good = '{"id": 1, "text": "short"}'
    path = write(tmp_path / "rows.jsonl", "\n".join([good, "x" * 5000, good, "y" * 5000]))
    kinds = [type(record) for record in read(path)]
    assert kinds == [InputRow, Reject, InputRow, Reject]


def test_misshapen_csv_row_is_rejected_alone_with_its_number(tmp_path: Path) -> None:
    body = (
        b'id,text,other\n1,one,\n2,"two, with ""quotes""\nand a line",x\n3,too,many,columns\n'
        b"4\n5,caf\xe9,x\n6,,x\n,no id,x\n7,last,x\n8"
    )
    path = write(tmp_path / "rows.csv", body)
    records = read(path)
    assert [outcome(record) for record in records] == [
        ("1", "one"),
        ("2", 'two, with "quotes"\nand a line'),
        (f"{path}:3", "4 columns where the header has 3"),
        (f"{path}:4", "1 columns where the header has 3"),
        ("5", "text: not UTF-8 at byte 3"),
        ("6", "text: empty"),
        (f"{path}:7", "id: empty"),
        ("7", "last"),
        (f"{path}:9", "1 columns where the header has 3"),
    ]
    assert [record.place for record in records] == [f"{path}:{n}" for n in range(1, 10)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('1,"never closed\n2,b\n3,"c\nd"\n', ["behind a closing quote!", "b", "c\nd"]),
        ('1,"never closed\n2,b\n', ["not closed!", "b"]),
        ('1,a\n2,"b" and more\n3,c\n', ["a", "behind a closing quote!", "c"]),
        ('1,5" disk\n2,b\n', ['5" disk', "b"]),
        ('1,"a\r\nb"\r\n2,c\r\n', ["a\r\nb", "c"]),
        ("1,a\r2,b\r", ["a", "b"]),
        ('1,"a"\n\n2,b\n', ["a", "1 columns!", "b"]),
    ],
)
def test_quote_takes_no_other_row_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: list[str]
) -> None:
    """`!` marks a rejected row, whose reason has the text."""
    path = write(tmp_path / "rows.csv", "id,text\n" + body)
    for read_bytes in (1, 3, 1 << 20):
        monkeypatch.setattr(readers, "READ_BYTES", read_bytes)
        records = read(path)
        found = [(type(record) is InputRow, outcome(record)[1]) for record in records]
        assert len(found) == len(expected), found
        for (is_row, text), wanted in zip(found, expected, strict=True):
            assert (is_row and text == wanted) or (not is_row and wanted.rstrip("!") in text)


def test_bad_parquet_value_is_rejected_alone(tmp_path: Path) -> None:
    not_utf8 = pyarrow.Array.from_buffers(
        pyarrow.string(), 5, pyarrow.array([b"a", b"\xe9", b"", b"d", None], "binary").buffers()
    )
    table = pyarrow.table({"id": [1, 2, 3, None, 5], "text": not_utf8, "prefix": ["p"] * 5})
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    assert [outcome(record) for record in read(path)] == [
        (1, "a"),
        (2, "text: not UTF-8 at byte 0"),
        (3, "text: empty"),
        (f"{path}:4", "id: missing"),
        (5, "text: missing"),
    ]


def test_globs_folders_compression_and_uris_find_the_same_rows(tmp_path: Path) -> None:
    line = '{{"id": {0}, "text": "t{0}"}}\n'
    write(tmp_path / "1.jsonl", line.format(1))
    write(tmp_path / "2.jsonl.gz", gzip.compress(line.format(2).encode()))
    write(tmp_path / "3.csv.bz2", bz2.compress(b"id,text\n3,t3\n"))
    write(tmp_path / "notes.txt", "not an input")
    notices: list[str] = []
    find_sources([str(tmp_path)], notices.append)
    assert notices == [f"{tmp_path}: 1 file skipped, such as {tmp_path}/notes.txt: no known ending"]
    expected = ["t1", "t2", "t3"]
    for given_ in (
        [tmp_path],
        [f"{tmp_path}/*.jsonl*", tmp_path / "3.csv.bz2"],
        [f"file://{tmp_path}"],
    ):
        assert [record.text for record in read(*given_) if isinstance(record, InputRow)] == expected
    assert len(read(f"{tmp_path}/1.jsonl", f"{tmp_path}/*.jsonl*")) == 2  # each file once
    assert len(read(f"file://{tmp_path}/[12].jsonl*")) == 2


def test_names_are_exact_and_hidden_files_are_no_data(tmp_path: Path) -> None:
    row = '{"id": 1, "text": "TEXT"}\n'
    kept = ["a[1].jsonl", "a*.jsonl", "ab.jsonl", "set[2024]/c.jsonl", "sub/b.jsonl", "x_.jsonl"]
    left = [".hidden.jsonl", "._a.jsonl", "_SUCCESS.json", "_delta_log/0.json", "~$b.csv"]
    left += [".ipynb_checkpoints/a.jsonl", "sub/_temporary/0/part.jsonl", "a.jsonl.bak"]
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, row.replace("TEXT", name))

    def names(*inputs: object) -> list[str]:
        return sorted(record.text for record in read(*map(str, inputs)))  # type: ignore[union-attr]

    for base in (str(tmp_path), f"file://{tmp_path}"):
        assert names(base) == sorted(kept)
        assert names(f"{base}/a[1].jsonl", f"{base}/set[2024]") == [
            "a[1].jsonl",
            "set[2024]/c.jsonl",
        ]
        assert names(f"{base}/a*.jsonl") == ["a*.jsonl"]
        assert names(f"{base}/a[b*].jsonl") == ["a*.jsonl", "ab.jsonl"]
        assert names(f"{base}/.hid*") == [".hidden.jsonl"]
        assert names(f"{base}/_delta_log/*") == ["_delta_log/0.json"]
    assert names(f"{tmp_path}/**/*.jsonl") == sorted(kept)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "ab.jsonl")
    assert names(tmp_path, tmp_path / "sub/../ab.jsonl", f"file://{tmp_path}") == sorted(kept)


def test_local_name_may_look_like_a_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "http:x.jsonl", '{"id": 1, "text": "a"}\n')
    assert [outcome(record) for record in read("http:x.jsonl")] == [(1, "a")]


def test_linked_folders_are_entered_once(tmp_path: Path) -> None:
    """Two links to the folder itself: 2 ** 40 paths for a walk that follows them all."""
    (tmp_path / "inner").mkdir()
    for name in ("inner/a.jsonl", "z.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    for name in ("link", "other"):
        (tmp_path / name).symlink_to(tmp_path)
    names = [source.file.name for source in find_sources([str(tmp_path)])]
    assert names == [f"{tmp_path}/inner/a.jsonl", f"{tmp_path}/z.jsonl"]
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        find_sources([str(tmp_path)])


def test_file_with_two_names_is_read_once_and_special_file_not_at_all(tmp_path: Path) -> None:
    row = '{"id": 1, "text": "a"}\n'
    write(tmp_path / "a.jsonl", row)
    (tmp_path / "b.jsonl").hardlink_to(tmp_path / "a.jsonl")
    write(tmp_path / "copy\n.jsonl", row)
    os.mkfifo(tmp_path / "pipe.jsonl")
    notices: list[str] = []
    names = [source.file.name for source in find_sources([str(tmp_path)], notices.append)]
    assert names == [f"{tmp_path}/a.jsonl", f"{tmp_path}/copy\n.jsonl"]
    assert [notice.count("\n") for notice in notices] == [0, 0]
    assert "pipe.jsonl: no regular file" in notices[1]
    assert f"b.jsonl: the same file as {tmp_path}/a.jsonl" in notices[0]
    with one_line_error(ConfigError, "no regular file"):
        find_sources([str(tmp_path / "pipe.jsonl")])
    write(tmp_path / "\udcff.jsonl", row)
    with one_line_error(ConfigError, "not UTF-8: rename"):
        find_sources([str(tmp_path)])


def test_output_of_a_job_is_no_input_unless_named(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (tmp_path, own, other):
        folder.mkdir(exist_ok=True)
        write(folder / "part-00000.jsonl", '{"id": 1, "text": "a"}\n')
    for job_file in (own / JOB, own / LEDGER, other / JOB, other / LEDGER):
        write(job_file, "{}")

    def names(given: str) -> list[str]:
        return [source.file.name for source in find_sources([given], output=own)]

    for given_ in (f"{tmp_path}", f"{tmp_path}/**/*.jsonl", f"{own}", f"{own}/*"):
        inner = given_.startswith(str(own))
        assert names(given_) == [f"{tmp_path}/part-00000.jsonl"] * (not inner)
    assert names(f"{other}/part-*") == [f"{other}/part-00000.jsonl"]


@pytest.mark.parametrize("change", ["grow", "truncate", "replace"])
def test_file_that_changes_while_it_is_read_ends_the_job(tmp_path: Path, change: str) -> None:
    path = write(tmp_path / "rows.jsonl", '{"id": 1, "text": "a"}\n' * 3)
    records = read_all(find_sources([str(path)]), FIELDS, ReadProgress(1))
    next(records)
    if change == "grow":
        path.open("a").write('{"id": 2, "text": "b"}\n')
    elif change == "truncate":
        os.truncate(path, 10)
    else:
        write(tmp_path / "new", path.read_bytes()).replace(path)
    with one_line_error(JobError, f"{path}: changed while the job read it"):
        list(records)


def test_corrupt_file_ends_with_rejected_row_and_next_file_follows(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"id": n, "text": f"{n}" * 50}) + "\n" for n in range(20_000))
    whole = gzip.compress(lines.encode(), compresslevel=0)
    broken = whole[: len(whole) - 300_000] + bytes(200_000)
    first = write(tmp_path / "1.jsonl.gz", broken)
    second = write(tmp_path / "2.jsonl", '{"id": "x", "text": "still read"}')
    *_, at_break, last = read(first, second)
    assert isinstance(at_break, Reject)
    assert at_break.reason.startswith("the file cannot be read from here on")
    assert outcome(last) == ("x", "still read")


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("rows.csv", b"id,body\n1,a\n", "no column 'text' (--text-field); it has id, body"),
        ("rows.csv", b"text\na\n", "no column 'id' (--id-field); it has text"),
        ("rows.csv", b"id,text,text\n1,a,b\n", "more than one column 'text'"),
        ("rows.csv", b"\xff\n", "cannot be read"),
        ("rows.parquet", b"not parquet", "cannot be read"),
        ("rows.jsonl", '{"id": 1}\n'.encode("utf-16"), "UTF-16"),
        ("rows.jsonl", b"\xfe\xff\0{", "UTF-16"),
        ("rows.csv", "id,text\n".encode("utf-16"), "UTF-16"),
        ("rows.jsonl", gzip.compress(b'{"id": 1}\n', mtime=0), "name it by its format"),
        ("rows.jsonl", b'{"id": 1}\r{"id": 2}\r', "lines end with CR"),
        ("rows.jsonl.gz", gzip.compress(b'{"id": 1}\n', mtime=0) + b"rest", "incorrect header"),
        ("rows.json", b'[\n  {"id": 1, "text": "a"}\n]', "jq -c"),
        ("rows.json", b'\xef\xbb\xbf[{"id": 1, "text": "a"}]', "jq -c"),
        ("rows.json.gz", gzip.compress(b'{\r\n "id": 1}\n', mtime=0), "jq -c"),
        ("rows.xlsx", b"", "no known ending"),
        ("rows.parquet.gz", b"", "compressed inside"),
        ("none.jsonl", None, "no such file"),
    ],
)
def test_unusable_file_is_reported_before_the_job_starts(
    tmp_path: Path, name: str, body: bytes | None, words: str
) -> None:
    if body is not None:
        write(tmp_path / name, body)
    with one_line_error(ConfigError, words):
        for source in find_sources([str(tmp_path / name)]):
            source.open(FIELDS)
