"""Counts of routing in files: written whole, believed as far as they agree with the model."""

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
CountArrays = dict[str, Any]


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


def test_counts_are_read_as_they_were_written(path: Path) -> None:
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


def test_the_bundled_model_has_both_parts() -> None:
    assert RoutingProfile.read(FOLDER / "routing.safetensors", FOLDER, SPEC).precision
    counts = RoutingCounts.read(FOLDER / "routing.safetensors", FOLDER, SPEC)
    assert counts.counted > 100_000
    assert len(counts.paths.ids_P2) == 4096
    assert (FOLDER / "routing.safetensors").stat().st_size < 1_100_000


def negative(arrays: CountArrays) -> None:
    arrays["load.0"][3] = -1


def not_the_load(arrays: CountArrays) -> None:
    arrays["load.0"][[0, 1]] += [1, -1]


def too_many(arrays: CountArrays) -> None:
    arrays["load.0"][0] += 5
    arrays["together.0"][0, 0] += 5


def floats(arrays: CountArrays) -> None:
    arrays["load.0"] = np.full(E, np.nan, np.float32)


def not_symmetric(arrays: CountArrays) -> None:
    arrays["together.0"][0, 1] += 1


def together_too_often(arrays: CountArrays) -> None:
    arrays["together.0"][[0, 1], [1, 0]] = 1 << 40


def beyond_vocabulary(arrays: CountArrays) -> None:
    arrays["pairs.0"][-1, 0] = V * E


def never_seen(arrays: CountArrays) -> None:
    arrays["pairs.4"][0, 1] = 0


def twice_the_same(arrays: CountArrays) -> None:
    arrays["pairs.4"][1] = arrays["pairs.4"][0]


def no_expert(arrays: CountArrays) -> None:
    arrays["paths"][0, 0, 0] = E


def expert_twice(arrays: CountArrays) -> None:
    arrays["paths"][0, 0] = 3


def path_beyond_vocabulary(arrays: CountArrays) -> None:
    arrays["path_ids"][0, 1] = V


def path_before_none(arrays: CountArrays) -> None:
    arrays["path_ids"][0, 0] = -1


def set_not_ascending(arrays: CountArrays) -> None:
    arrays["sets.0"][0] = arrays["sets.0"][0, ::-1]


def set_too_often(arrays: CountArrays) -> None:
    arrays["times.0"][0] = 5000


def short_by_less(arrays: CountArrays) -> None:
    arrays["short.0"][0] = -1


def of_no_tokens(arrays: CountArrays) -> None:
    arrays["counted"][0] = -5


def paths_without_ids(arrays: CountArrays) -> None:
    arrays["path_ids"] = arrays["path_ids"][1:]


def a_layer_less(arrays: CountArrays) -> None:
    del arrays["pairs.4"]


def more_experts(arrays: CountArrays) -> None:
    arrays["load.0"] = np.zeros(2 * E, np.int64)


def another_tokenizer(arrays: CountArrays) -> None:
    arrays["tokenizer"] = np.zeros(32, np.uint8)


def no_tokenizer(arrays: CountArrays) -> None:
    del arrays["tokenizer"]


def another_checkpoint(arrays: CountArrays) -> None:
    arrays["checkpoint"] = np.zeros(32, np.uint8)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (negative, "load.0: a count is negative"),
        (not_the_load, "together.0: differs from load.0"),
        (too_many, "load.0: 1200 tokens have 2400 experts"),
        (floats, r"load.0: F32 \[16\], expected I64"),
        (not_symmetric, "together.0: is not symmetric"),
        (together_too_often, "together.0: two experts were together more often"),
        (beyond_vocabulary, "pairs.0: a token id is not one of the vocabulary's 4096"),
        (never_seen, "pairs.4: a pair was seen less than once"),
        (twice_the_same, "pairs.4: pairs are not in ascending order"),
        (no_expert, "paths: not all are of 16 experts"),
        (expert_twice, "paths: an expert appears twice"),
        (path_beyond_vocabulary, "path_ids: a token id is not one"),
        (path_before_none, "path_ids: a token id is not one"),
        (set_not_ascending, "sets.0: a set is not in ascending order"),
        (set_too_often, "times.0: does not fit 1200 tokens"),
        (short_by_less, "short.0: a count is negative"),
        (of_no_tokens, "counted: -5 is not a token count"),
        (paths_without_ids, "path_ids: I32"),
        (a_layer_less, "pairs.4: missing"),
        (more_experts, "load.0: I64"),
        (another_tokenizer, "a routing profile of another tokenizer than that of"),
        (no_tokenizer, "a routing profile of another tokenizer than that of"),
        (another_checkpoint, "a routing profile of another checkpoint than that of"),
    ],
)
def test_counts_that_contradict_the_model_or_themselves_are_refused(
    path: Path, damage: Callable[[CountArrays], None], named: str
) -> None:
    arrays = {name: array.copy() for name, array in counts_of().arrays().items()}
    damage(arrays)
    write_arrays(path, arrays)
    with pytest.raises(CheckpointError, match=named) as refused:
        RoutingCounts.read(path, FOLDER, SPEC)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(str(path))


def test_profile_with_too_few_tokens_is_rejected(path: Path) -> None:
    counts_of(300).write(path)
    with pytest.raises(CheckpointError, match=f"of 300 tokens.*at least {MIN_TOKENS}"):
        RoutingCounts.read(path, FOLDER, SPEC)
    assert RoutingCounts.read(path, FOLDER, SPEC, min_tokens=1).counted == 300


def test_a_tokenizer_of_equal_size_is_another_one(path: Path, tmp_path: Path) -> None:
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
    """2 GB of them, as a header says; the file is that large, without the blocks."""
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
def test_a_file_that_claims_much_costs_little_memory(
    path: Path, write: Callable[[Path], None], named: str
) -> None:
    write(path)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=named):
        RoutingCounts.read(path, FOLDER, SPEC)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20 << 20
