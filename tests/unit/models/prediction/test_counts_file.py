"""Files of routing counts are written atomically and validated against the model."""

from __future__ import annotations

import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import CheckpointError
from models.prediction.profile_file import checkpoint_digest, write_arrays
from models.prediction.routing_counter import CountedModel, RoutingCounter
from models.prediction.routing_counts import MIN_TOKENS, RoutingCounts
from models.prediction.routing_profile import RoutingProfile
from models.spec.model import read_spec
from models.spec.safetensors_file import SafetensorsFile
from models.text.tokenizer_files import tokenizer_digest

FOLDER = Path(__file__).resolve().parents[4] / "models" / "bundled"
SPEC = read_spec(FOLDER)
E, K, V, LAYERS = SPEC.num_experts, SPEC.top_k, SPEC.vocab_size, SPEC.moe_layers


def counts_of(tokens: int = 1200, seed: int = 0) -> RoutingCounts:
    random = np.random.default_rng(seed)
    of = CountedModel(checkpoint_digest(FOLDER), tokenizer_digest(FOLDER), LAYERS, E, K, V)
    counter = RoutingCounter(of)
    paths = np.argsort(random.random((tokens, len(LAYERS), E)), axis=2)[:, :, :K]
    counter.add(random.integers(0, V, (tokens, 2)), paths)
    return counter.counts()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "routing.safetensors"


def test_written_counts_are_read_unchanged(path: Path) -> None:
    counts = counts_of()
    counts.write(path)
    read = RoutingCounts.read(path, FOLDER, SPEC)
    actual, expected = counts.arrays(), read.arrays()
    assert actual.keys() == expected.keys()
    assert all(np.array_equal(actual[name], expected[name]) for name in actual)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    with pytest.raises(CheckpointError, match="cannot be written"):
        counts.write(path.parent / "no" / "folder")


def test_reader_reports_missing_part_of_profile(path: Path) -> None:
    counts = counts_of()
    counts.write(path)
    with pytest.raises(
        CheckpointError, match="a routing profile with counts but without predictors"
    ):
        RoutingProfile.read(path, FOLDER, SPEC)
    predictor_profile = RoutingProfile.read(FOLDER / "routing.safetensors", FOLDER, SPEC)
    predictor_profile.write(path, FOLDER)
    with pytest.raises(CheckpointError, match="a routing profile without counts"):
        RoutingCounts.read(path, FOLDER, SPEC)
    predictor_profile.write(path, FOLDER, counts)
    assert RoutingCounts.read(path, FOLDER, SPEC).counted == counts.counted
    again = RoutingProfile.read(path, FOLDER, SPEC)
    assert torch.equal(again.tokens_VK, predictor_profile.tokens_VK)
    assert all(
        torch.equal(again.maps[layer], predictor_profile.maps[layer]) for layer in LAYERS[:-1]
    )


def test_bundled_profile_has_predictors_and_counts() -> None:
    assert RoutingProfile.read(FOLDER / "routing.safetensors", FOLDER, SPEC).precision
    counts = RoutingCounts.read(FOLDER / "routing.safetensors", FOLDER, SPEC)
    assert counts.counted > 100_000
    assert len(counts.paths.ids_P2) == 4096
    assert (FOLDER / "routing.safetensors").stat().st_size < 1_100_000


def put(index: Any, value: Any) -> Callable[[Any], Any]:
    """Return a change that sets an entry."""

    def change(array: Any) -> Any:
        array[index] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("load.0", put(3, -1), "load.0: a count is negative"),
        ("load.0", lambda array: np.roll(array, 1), "together.0: differs from load.0"),
        ("load.0", lambda array: array + 5, "load.0: 1200 tokens have 2400 experts"),
        ("load.0", lambda _: np.full(E, np.nan, np.float32), r"load.0: F32 \[16\], expected I64"),
        ("load.0", lambda _: np.zeros(2 * E, np.int64), "load.0: I64"),
        ("together.0", put((0, 1), 1199), "together.0: is not symmetric"),
        (
            "together.0",
            put(([0, 1], [1, 0]), 1 << 40),
            "together.0: two experts were together more often",
        ),
        ("pairs.0", put((-1, 0), V * E), "pairs.0: a token id is not one of the vocabulary's 4096"),
        ("pairs.4", put((0, 1), 0), "pairs.4: a pair was seen less than once"),
        ("pairs.4", put((1, 0), 0), "pairs.4: pairs are not in ascending order"),
        ("pairs.4", None, "pairs.4: missing"),
        ("paths", put((0, 0, 0), E), "paths: not all are of 16 experts"),
        ("paths", put((0, 0), 3), "paths: an expert appears twice"),
        ("path_ids", put((0, 1), V), "path_ids: a token id is not one"),
        ("path_ids", put((0, 0), -1), "path_ids: a token id is not one"),
        ("path_ids", lambda array: array[1:], "path_ids: I32"),
        ("sets.0", put(0, [5, 2]), "sets.0: a set is not in ascending order"),
        ("times.0", put(0, 5000), "times.0: does not fit 1200 tokens"),
        ("short.0", put(0, -1), "short.0: a count is negative"),
        ("counted", put(0, -5), "counted: -5 is not a token count"),
        ("tokenizer", put(0, 0), "a routing profile of another tokenizer than that of"),
        ("tokenizer", None, "a routing profile of another tokenizer than that of"),
        ("checkpoint", put(0, 0), "a routing profile of another checkpoint than that of"),
    ],
)
def test_inconsistent_counts_are_rejected(
    path: Path, name: str, change: Callable[[Any], Any] | None, message: str
) -> None:
    arrays = {each: array.copy() for each, array in counts_of().arrays().items()}
    array = arrays.pop(name)
    if change is not None:
        arrays[name] = change(array)
    write_arrays(path, arrays)
    with pytest.raises(CheckpointError, match=message) as refused:
        RoutingCounts.read(path, FOLDER, SPEC)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(str(path))


def test_profile_with_too_few_tokens_is_rejected(path: Path) -> None:
    counts_of(300).write(path)
    with pytest.raises(CheckpointError, match=f"of 300 tokens.*at least {MIN_TOKENS}"):
        RoutingCounts.read(path, FOLDER, SPEC)
    assert RoutingCounts.read(path, FOLDER, SPEC, min_tokens=1).counted == 300


def test_changed_tokenizer_of_equal_size_is_rejected(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in FOLDER.iterdir():
        shutil.copy(file, folder)
    counts_of().write(path)
    assert RoutingCounts.read(path, folder, SPEC).counted == 1200
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"Ġthe": ', '"Ġeht": '))
    with pytest.raises(CheckpointError, match="another tokenizer than that of"):
        RoutingCounts.read(path, folder, SPEC)


def zeros(path: Path) -> None:
    """Write a header of 2 GB of zeros and a sparse file of that size."""
    arrays = counts_of().arrays()
    arrays["pairs.0"] = arrays["pairs.0"][:0]
    write_arrays(path, arrays)
    body = path.read_bytes()
    length = int.from_bytes(body[:8], "little")
    first = SafetensorsFile(path).entries["pairs.0"].first_byte - 8 - length
    rows = 1 << 28
    header = body[8 : 8 + length].decode().rstrip()
    old = f'"shape": [0, 2], "data_offsets": [{first}, {first}]'
    assert header.count(old) == 1
    header = header.replace(old, f'"shape": [{rows}, 2], "data_offsets": [0, {8 * rows}]')
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode() + body[8 + length :])
        file.truncate(8 + len(header) + 8 * rows)


def long_header(path: Path) -> None:
    with path.open("wb") as file:
        file.write((90 << 20).to_bytes(8, "little"))
        file.truncate(100 << 20)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"counted": [1200]}))


def cut(path: Path) -> None:
    counts_of().write(path)
    path.write_bytes(path.read_bytes()[:-1000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (zeros, r"pairs.0: I32 \[268435456, 2\], expected I32 \['at most 1048576', 2\]"),
        (long_header, "truncated or not a safetensors file"),
        (pickled, "truncated or not a safetensors file"),
        (cut, "truncated"),
        (empty, "truncated or not a safetensors file"),
    ],
)
def test_damaged_file_is_rejected_with_little_memory(
    path: Path, write: Callable[[Path], None], named: str
) -> None:
    write(path)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=named):
        RoutingCounts.read(path, FOLDER, SPEC)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20 << 20
