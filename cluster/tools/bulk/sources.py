"""Input files: search, format by ending, and opening through pyarrow."""

from __future__ import annotations

import codecs
import contextlib
import fnmatch
import glob
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow
from pyarrow import fs

from cluster.tools.bulk.output import JOB, LEDGER
from cluster.tools.bulk.readers import OpenFile, read_csv, read_lines, read_parquet
from cluster.tools.bulk.records import Fields, InputRecord, Reject
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
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1\x15")  # gzip, zstd, Parquet
_CR_LINES = re.compile(rb"[^\n]*\}[ \t]*\r[ \t]*\{")
_MULTILINE_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*[{\]\n]|\{\s*\n)")
_BROKEN_DATA = re.compile("inflate|decompress|truncated|corrupt|bzip2|zstd", re.IGNORECASE)


class _Named(NamedTuple):
    """path: on the filesystem. name: for the user."""

    filesystem: fs.FileSystem
    path: str
    name: str


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
        self._state = self._size_and_time()
        self.file = self._fingerprint(name)

    @property
    def identity(self) -> tuple[object, ...]:
        """A value that all names of the file share: links to it, also hard ones."""
        place: tuple[object, ...] = (self._path,)
        if self._filesystem.type_name == "local":
            found = os.stat(self._path)
            place = (found.st_dev, found.st_ino)
        return self._filesystem.type_name, *place, self.file.size_bytes, self.file.digest

    def check_unchanged(self) -> None:
        """Raise JobError if the file has been written since it was found."""
        if self._size_and_time() != self._state:
            raise JobError(
                f"{self.file.name}: changed while the job read it: let its writer end, and give "
                "another --output folder (--resume if only its time has changed)"
            )

    def _size_and_time(self) -> tuple[int | None, int | None]:
        info = self._filesystem.get_file_info(self._path)
        return info.size, info.mtime_ns

    def _fingerprint(self, name: str) -> SourceFile:
        with self._filesystem.open_input_file(self._path) as file:
            size = file.size()
            digest = hashlib.blake2b(file.read(_END_BYTES), digest_size=16)
            file.seek(max(0, size - _END_BYTES))
            digest.update(file.read(_END_BYTES))
        return SourceFile(name, size, digest.hexdigest())

    def open(self, fields: Fields) -> OpenFile:
        """Open the file. Raises ConfigError if its content or columns do not fit."""
        name, size = self.file.name, self.file.size_bytes
        try:
            raw = self._filesystem.open_input_file(self._path)
            if self._format == "parquet":
                return read_parquet(name, size, raw, fields)
            if size == 0:
                return OpenFile(iter(()), lambda: 0)

            def position() -> int:
                return size if raw.closed else int(raw.tell())

            stream = raw
            if self._compression:
                stream = pyarrow.CompressedInputStream(raw, self._compression)
            start = stream.read(_END_BYTES)
            _check_start(name, start, self._format)
            rows = read_csv if self._format == "csv" else read_lines
            return OpenFile(rows(name, _read_from(start, stream), fields), position)
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise ConfigError(f"{name}: cannot be read: {_one_line(error)}") from None


def _read_from(start: bytes, stream: pyarrow.NativeFile) -> Callable[[int], bytes]:
    """Return a `read` of the stream whose start has been read already."""
    ahead = [start]
    return lambda size: ahead.pop() if ahead else stream.read(size)


def _check_start(name: str, start: bytes, kind: str) -> None:
    """Raise ConfigError if the text is of another form than its name states."""
    if start.startswith(_UTF16):
        raise ConfigError(f"{name}: UTF-16; convert it to UTF-8")
    if start.startswith(_PACKED):
        raise ConfigError(f"{name}: not text, but compressed or Parquet; name it by its format")
    if kind != "lines":
        return
    if _MULTILINE_JSON.match(start):
        raise ConfigError(
            f"{name}: expected one JSON object a line; convert it: jq -c '.[]' of an array,"
            " jq -c . of objects on several lines"
        )
    if _CR_LINES.match(start):
        raise ConfigError(f"{name}: lines end with CR; convert it: tr '\\r' '\\n'")


def find_sources(
    inputs: Sequence[str], notify: Notify = lambda line: None, output: Path | None = None
) -> list[Source]:
    """Return the files of `inputs` (paths, URIs, globs, folders), each once. Raises ConfigError.

    notify: called with a line about files that are skipped. output: the job's own folder, which is
    no input.
    """
    found: dict[tuple[object, ...], Source] = {}
    for given in inputs:
        skipped: dict[str, list[str]] = {}
        try:
            named = _expand(given, skipped)
            if not named:
                raise ConfigError(f"--input {_shown(given)}: no such file")
            for each in named:
                reason = _why_no_data(each, given, output)
                if reason is None:
                    source = Source(*each)
                    first = found.setdefault(source.identity, source).file.name
                    reason = f"the same file as {_shown(first)}" if first != each.name else None
                elif each.path == given:
                    raise OSError(reason)
                if reason is not None:
                    skipped.setdefault(reason, []).append(each.name)
        except (OSError, pyarrow.ArrowException, ValueError) as error:
            text = f"--input {_shown(given)}: cannot be read: {_one_line(error)}"
            raise ConfigError(text) from None
        for reason, names in skipped.items():
            count = f"{len(names)} file{'s' * (len(names) > 1)}"
            notify(f"{_shown(given)}: {count} skipped, such as {_shown(names[0])}: {reason}")
    return list(found.values())


def _why_no_data(file: _Named, given: str, output: Path | None) -> str | None:
    """Return why a local file is no input, None if it is one.

    Opening a pipe could block. The output of a job is an input if `given` names its folder.
    """
    if file.filesystem.type_name != "local":
        return None
    with contextlib.suppress(OSError):  # reported when it is opened
        if not stat.S_ISREG(os.stat(file.path).st_mode):
            return "no regular file: a pipe, a socket or a device"
    folder = os.path.dirname(os.path.realpath(file.path))
    if not all(os.path.exists(os.path.join(folder, name)) for name in (JOB, LEDGER)):
        return None
    if output is not None and folder == os.path.realpath(output):
        return "output of this job"
    is_named = folder in (os.path.realpath(given), os.path.realpath(os.path.dirname(given)))
    return None if is_named else "output of a bulk job"


def read_all(
    sources: Sequence[Source], fields: Fields, watch: ReadProgress
) -> Iterator[InputRecord]:
    """Yield the rows of all files in turn.

    Where the data of a file is corrupt, a rejected row takes the place of the rest, and the next
    file follows. Raises JobError if a later attempt may succeed.
    """
    for source in sources:
        file = source.open(fields)
        watch.begin(file.position)
        rows = 0
        try:
            for record in file.rows:
                rows += 1
                yield record
            source.check_unchanged()
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
        watch.end(source.file.size_bytes)


class ReadProgress:
    """Fraction of the input that has been read. Written by one thread, read by any."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._done_bytes = 0
        self._position: Callable[[], int] | None = None

    def begin(self, position: Callable[[], int]) -> None:
        self._position = position

    def end(self, size_bytes: int) -> None:
        self._position = None
        self._done_bytes += size_bytes

    @property
    def fraction(self) -> float:
        position = self._position
        read = self._done_bytes + (position() if position is not None else 0)
        return min(1.0, read / self.total_bytes) if self.total_bytes else 1.0


def _expand(given: str, skipped: dict[str, list[str]]) -> list[_Named]:
    """Return the files. Only what is not the name of a file or folder is a pattern.

    skipped: gets the files with unknown endings.
    """
    if "://" not in given:
        local = fs.LocalFileSystem()
        names = [given]
        if _MAGIC.search(given) and not os.path.lexists(given):
            matches = sorted(glob.glob(given, recursive=True))
            names = [name for name in matches if not _is_hidden(name, given)]
        names = [f"./{name}" if re.match(r"[\w.+-]+:", name) else name for name in names]  # no URI
        expanded = [inner for name in names for inner in _files(local, name, skipped)]
        return [_Named(local, name, name) for name in expanded]
    scheme = given[: given.index("://") + 3]
    base, query, options = given.partition("?")  # of an object store: ?region=...
    fixed, pattern = _split_pattern(base)
    filesystem, path = fs.FileSystem.from_uri(fixed + query + options)
    exact = f"{path}/{pattern}" if pattern else path
    if pattern and filesystem.get_file_info(exact).type == fs.FileType.NotFound:
        paths = _remote_glob(filesystem, path, pattern)
    else:
        paths = _files(filesystem, exact, skipped)
    return [_Named(filesystem, one, scheme + one) for one in paths]


def _split_pattern(uri: str) -> tuple[str, str]:
    """Split off the leading folders without * and [."""
    parts = uri.split("/")
    at = next((n for n, part in enumerate(parts) if re.search(r"[*\[]", part)), len(parts))
    return "/".join(parts[:at]), "/".join(parts[at:])


def _files(filesystem: fs.FileSystem, path: str, skipped: dict[str, list[str]]) -> list[str]:
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
        skipped.setdefault("no known ending", []).extend(others)
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
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"{_shown(name)}: the name is not UTF-8: rename the file")
    if ending not in FORMATS:
        raise ValueError(f"{name} has no known ending ({_ENDINGS})")
    if compression and FORMATS[ending] == "parquet":
        raise ValueError(f"{name}: Parquet is compressed inside; unpack the file")
    return FORMATS[ending], COMPRESSIONS.get(compression)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _shown(name: str) -> str:
    """Return a name as it can be printed on one line."""
    return name if name.isprintable() else repr(name)
