"""Input files: search, format by ending, and opening through pyarrow."""

from __future__ import annotations

import codecs
import fnmatch
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow
from pyarrow import fs

from cluster.tools.bulk.readers import CsvReader, LineReader, ParquetReader
from cluster.tools.bulk.records import Fields, InputRecord, RecordReader, Reject
from contracts.errors import ConfigError, JobError

FORMATS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".csv": "csv",
    ".parquet": "parquet",
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_ENDINGS = f"{', '.join(FORMATS)}; text also with {', '.join(COMPRESSIONS)}"
_END_BYTES = 64 << 10
_HIDDEN = frozenset("._~")
_MAGIC = re.compile(r"[*?\[]")
Notify = Callable[[str], object]
_MULTILINE_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*[{\]\n]|\{\s*\n)")
_BROKEN_DATA = re.compile("inflate|decompress|truncated|corrupt|bzip2|zstd", re.IGNORECASE)


class SourceFile(msgspec.Struct, frozen=True):
    """name: as given by the user. digest: of its first and last 64 KiB."""

    name: str
    size_bytes: int
    digest: str


class Source:
    """An input file; `open` starts a reader at its beginning."""

    def __init__(self, filesystem: fs.FileSystem, path: str, name: str) -> None:
        self._filesystem, self._path = filesystem, path
        self._format, self._compression = _kind(name)
        self.file = self._fingerprint(name)

    def _fingerprint(self, name: str) -> SourceFile:
        with self._filesystem.open_input_file(self._path) as file:
            size = file.size()
            digest = hashlib.blake2b(file.read(_END_BYTES), digest_size=16)
            file.seek(max(0, size - _END_BYTES))
            digest.update(file.read(_END_BYTES))
        return SourceFile(name, size, digest.hexdigest())

    def open(self, fields: Fields) -> RecordReader:
        """Open the file. Raises ConfigError if its content or columns do not fit."""
        name, size = self.file.name, self.file.size_bytes
        try:
            raw = self._filesystem.open_input_file(self._path)
            if self._format == "parquet":
                return ParquetReader(name, size, raw, fields)
            if size == 0:
                return LineReader(name, size, raw, lambda: 0, fields)

            def position() -> int:
                return size if raw.closed else int(raw.tell())

            stream = raw
            if self._compression:
                stream = pyarrow.CompressedInputStream(raw, self._compression)
            if self._format == "lines":
                self._check_lines(name)
            kind: Any = CsvReader if self._format == "csv" else LineReader
            reader: RecordReader = kind(name, size, stream, position, fields)
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise ConfigError(f"{name}: cannot be read: {_one_line(error)}") from None
        return reader

    def _check_lines(self, name: str) -> None:
        """Raise ConfigError if the file is UTF-16, or JSON of several lines."""
        with self._filesystem.open_input_stream(self._path, self._compression) as file:
            start = file.read(_END_BYTES)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ConfigError(f"{name}: UTF-16; convert it to UTF-8")
        if _MULTILINE_JSON.match(start):
            raise ConfigError(
                f"{name}: expected one JSON object a line; convert it: jq -c '.[]' of an array,"
                " jq -c . of objects on several lines"
            )


def find_sources(inputs: Sequence[str], notify: Notify = lambda line: None) -> list[Source]:
    """Return the files of `inputs` (paths, URIs, globs, folders), each once. Raises ConfigError.

    notify: called with a line about each folder with files that are skipped.
    """
    found: dict[tuple[str, str], Source] = {}
    for given in inputs:
        try:
            named = _expand(given, notify)
            for filesystem, path, name in named:
                is_local = filesystem.type_name == "local"
                key = (filesystem.type_name, os.path.realpath(path) if is_local else path)
                if key not in found:
                    found[key] = Source(filesystem, path, name)
        except (OSError, pyarrow.ArrowException, ValueError) as error:
            raise ConfigError(f"--input {given}: cannot be read: {_one_line(error)}") from None
        if not named:
            raise ConfigError(f"--input {given}: no such file")
    return list(found.values())


def read_all(
    sources: Sequence[Source], fields: Fields, watch: ReadProgress
) -> Iterator[InputRecord]:
    """Yield the rows of all files in turn.

    Where the data of a file is corrupt, a rejected row takes the place of the rest, and the next
    file follows. Raises JobError if a later attempt may succeed.
    """
    for source in sources:
        reader = source.open(fields)
        watch.begin(reader)
        rows = 0
        try:
            for record in reader:
                rows += 1
                yield record
        except (OSError, pyarrow.ArrowException) as error:
            name = source.file.name
            passing = isinstance(error, OSError) and not _BROKEN_DATA.search(str(error))
            if passing:
                raise JobError(
                    f"{name}: cannot be read beyond row {rows}: {_one_line(error)}; run again "
                    "with --resume"
                ) from None
            place = f"{name}:{rows + 1}"
            reason = f"the file cannot be read from here on: {_one_line(error)}"
            yield Reject(place, place, reason)
        watch.end(reader)


class ReadProgress:
    """Fraction of the input that has been read. Written by one thread, read by any."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._done_bytes = 0
        self._current: RecordReader | None = None

    def begin(self, reader: RecordReader) -> None:
        self._current = reader

    def end(self, reader: RecordReader) -> None:
        self._current = None
        self._done_bytes += reader.size_bytes

    @property
    def fraction(self) -> float:
        current = self._current
        read = self._done_bytes + (current.read_bytes if current is not None else 0)
        return min(1.0, read / self.total_bytes) if self.total_bytes else 1.0


def _expand(given: str, notify: Notify) -> list[tuple[fs.FileSystem, str, str]]:
    """Return (filesystem, path on it, name) of each file.

    Only what is not the name of a file or folder is a pattern.
    """
    if "://" not in given:
        local = fs.LocalFileSystem()
        names = [given]
        if _MAGIC.search(given) and not os.path.lexists(given):
            matches = sorted(glob.glob(given, recursive=True))
            names = [name for name in matches if not _is_hidden(name, given)]
        names = [f"./{name}" if re.match(r"[\w.+-]+:", name) else name for name in names]  # no URI
        expanded = [inner for name in names for inner in _files(local, name, notify)]
        return [(local, name, name) for name in expanded]
    scheme = given[: given.index("://") + 3]
    base, query, options = given.partition("?")  # of an object store: ?region=...
    fixed, pattern = _split_pattern(base)
    filesystem, path = fs.FileSystem.from_uri(fixed + query + options)
    exact = f"{path}/{pattern}" if pattern else path
    if pattern and filesystem.get_file_info(exact).type == fs.FileType.NotFound:
        paths = _remote_glob(filesystem, path, pattern)
    else:
        paths = _files(filesystem, exact, notify)
    return [(filesystem, one, scheme + one) for one in paths]


def _split_pattern(uri: str) -> tuple[str, str]:
    """Split off the leading folders without * and [."""
    parts = uri.split("/")
    at = next((n for n, part in enumerate(parts) if re.search(r"[*\[]", part)), len(parts))
    return "/".join(parts[:at]), "/".join(parts[at:])


def _files(filesystem: fs.FileSystem, path: str, notify: Notify) -> list[str]:
    """Return `path`, or the files with known endings in that folder that are not hidden."""
    info = filesystem.get_file_info(path)
    if info.type == fs.FileType.NotFound:
        raise FileNotFoundError("no such file")
    if info.type != fs.FileType.Directory:
        return [path]
    if filesystem.type_name == "local":
        files = list(_walk(path))
    else:
        listed = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
        files = [entry.path for entry in listed if entry.type == fs.FileType.File]
    base = info.path.rstrip("/")
    files = sorted(file for file in files if not _is_hidden(file.removeprefix(base), ""))
    others = [file for file in files if _split(file)[0] not in FORMATS]
    if others:
        notify(f"{path}: {len(others)} files with other endings are skipped, such as {others[0]}")
    return [file for file in files if _split(file)[0] in FORMATS]


def _walk(folder: str) -> Iterator[str]:
    """Yield the files below a local folder. Links are followed, each folder is entered once."""

    def fail(error: OSError) -> None:
        raise error

    entered = set()
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders.sort(key=lambda name: (os.path.islink(os.path.join(place, name)), name))
        if os.path.realpath(place) in entered:
            folders.clear()
            continue
        entered.add(os.path.realpath(place))
        yield from (os.path.join(place, name) for name in names)


def _is_hidden(path: str, pattern: str) -> bool:
    """Return whether a part of `path` begins as no part of the pattern that found it: . _ or ~.

    Spark, Hive and Arrow keep unfinished and internal files under such names, editors backups.
    """
    places = {".", ".."}
    explicit = {part[0] for part in pattern.split("/") if part and part not in places}
    hidden = tuple(_HIDDEN - explicit)
    return any(part.startswith(hidden) for part in path.split("/") if part not in places)


def _remote_glob(filesystem: fs.FileSystem, base: str, pattern: str) -> list[str]:
    """Return files below `base` that match part by part; a * does not cross a slash."""
    parts = f"{base}/{pattern}".split("/")
    listed = filesystem.get_file_info(fs.FileSelector(base, recursive=True))
    return sorted(
        entry.path
        for entry in listed
        if entry.type == fs.FileType.File
        and not _is_hidden(entry.path.removeprefix(base), pattern)
        and len(entry.path.split("/")) == len(parts)
        and all(map(fnmatch.fnmatchcase, entry.path.split("/"), parts))
    )


def _split(name: str) -> tuple[str, str]:
    """Return (ending, ending of the compression or "")."""
    stem, dot, last = name.rpartition(".")
    if f".{last}".lower() in COMPRESSIONS:
        return f".{stem.rpartition('.')[2]}".lower(), f".{last}".lower()
    return f"{dot}{last}".lower(), ""


def _kind(name: str) -> tuple[str, str | None]:
    ending, compression = _split(name)
    if ending not in FORMATS:
        raise ValueError(f"{name} has no known ending ({_ENDINGS})")
    if compression and FORMATS[ending] == "parquet":
        raise ValueError(f"{name}: Parquet is compressed inside; unpack the file")
    return FORMATS[ending], COMPRESSIONS.get(compression)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
