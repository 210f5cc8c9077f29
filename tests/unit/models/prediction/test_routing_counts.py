"""Counting, bounds, merging and files of routing counts."""

import dataclasses
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from contracts.errors import CheckpointError
from models.prediction.profile_file import write_arrays
from models.prediction.routing_counts import (
    COUNT_LIMITS,
    MIN_TOKENS,
    BoundedCounts,
    CountLimits,
    PathSample,
    RoutingCounter,
    RoutingCounts,
    RoutingPaths,
    merge_samples,
)
from models.prediction.routing_profile import RoutingProfile
from models.spec.model import read_spec

FOLDER = Path(__file__).resolve().parents[4] / "models" / "bundled"
SPEC = read_spec(FOLDER)
E, K, V = 6, 2, 40
LAYERS = (1, 2, 4)
OF = msgspec.structs.replace(SPEC, num_experts=E, top_k=K, vocab_size=V, moe_layers=LAYERS)
Tokens = tuple[NDArray[np.int64], NDArray[np.int64]]


def tokens(count: int, seed: int) -> Tokens:
    """Return ids, and paths that depend on them."""
    random = np.random.default_rng(seed)
    ids_T2 = random.integers(0, V, (count, 2))
    ids_T2[::7, 1] = -1
    scores = random.random((count, len(LAYERS), E))
    scores[np.arange(count), :, ids_T2[:, 0] % E] += 0.5
    return ids_T2, np.argsort(-scores, axis=2)[:, :, :K]


def counted(
    given_: Tokens, limits: CountLimits = COUNT_LIMITS, *, step: int = 1000
) -> RoutingCounts:
    counter = RoutingCounter(FOLDER, OF, limits)
    for start in range(0, len(given_[0]), step):
        counter.add(given_[0][start : start + step], given_[1][start : start + step])
    return counter.counts()


def arrays_equal(one: RoutingCounts, other: RoutingCounts) -> bool:
    actual, expected = one.arrays(), other.arrays()
    return actual.keys() == expected.keys() and all(
        np.array_equal(actual[name], expected[name]) for name in actual
    )


def test_all_tokens_are_counted_at_all_layers() -> None:
    ids_T2, paths_TLK = tokens(500, 0)
    found = counted((ids_T2, paths_TLK), step=37)
    assert found.counted == 500
    for position, layer in enumerate(LAYERS):
        of, experts_TK = found.layers[layer], paths_TLK[:, position]
        assert of.load_E.tolist() == np.bincount(experts_TK.ravel(), minlength=E).tolist()
        assert found.paths.paths_PLK[:, position].tolist() == experts_TK.tolist()
        for key, times in zip(of.pairs.keys, of.pairs.times, strict=True):
            seen = (ids_T2[:, 0] == key // E) & (experts_TK == key % E).any(1)
            assert seen.sum() == times
        assert of.pairs.times.sum() == 500 * K


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 90), st.integers(0, 9))
def test_merged_counts_equal_counts_of_all_tokens(
    first: int, second: int, step: int, seed: int
) -> None:
    one, other = tokens(first, seed), tokens(second, seed + 100)
    whole = tuple(np.concatenate(both) for both in zip(one, other, strict=True))
    added = counted(one, step=step).merge(counted(other))
    assert arrays_equal(added, counted((whole[0], whole[1]), step=step))


def test_counts_of_another_model_are_not_merged() -> None:
    actual = counted(tokens(10, 0))
    for name, other in (
        ("checkpoint", dataclasses.replace(actual, checkpoint=b"x" * 32)),
        ("tokenizer", dataclasses.replace(actual, tokenizer=b"x" * 32)),
    ):
        with pytest.raises(CheckpointError, match=f"of two {name}s cannot be merged"):
            actual.merge(other)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 12), st.integers(1, 40))
def test_counts_are_short_by_at_most_their_share(stream: list[int], most: int, step: int) -> None:
    counts = BoundedCounts(most)
    for start in range(0, len(stream), step):
        counts.add(np.array(stream[start : start + step], np.int64))
        assert len(counts._top.keys) + counts._limit - counts._room <= 3 * most
    keys, times = counts.counted()
    found = dict(zip(keys.tolist(), times.tolist(), strict=True))
    assert len(found) <= most
    for key in set(stream):
        truth = stream.count(key)
        assert truth - len(stream) // (most + 1) <= found.get(key, 0) <= truth


def test_merged_bounded_counts_stay_within_bounds() -> None:
    limits = CountLimits(pairs=30, paths=20)
    one, other = tokens(4000, 1), tokens(3000, 2)
    added = counted(one, limits).merge(counted(other, limits), limits)
    whole = counted((np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])))
    assert added.counted == 7000
    assert len(added.paths.ids_P2) == 20
    for layer in LAYERS:
        assert np.array_equal(added.layers[layer].load_E, whole.layers[layer].load_E)
        found, truth = added.layers[layer].pairs, whole.layers[layer].pairs
        assert len(found.keys) <= 30
        known = dict(zip(found.keys.tolist(), found.times.tolist(), strict=True))
        for key, times in zip(truth.keys.tolist(), truth.times.tolist(), strict=True):
            assert times - 7000 * K // 31 <= known.get(key, 0) <= times


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 60), st.lists(st.integers(0, 40), max_size=8), st.integers(0, 3))
def test_sample_is_independent_of_batching(most: int, batches: list[int], seed: int) -> None:
    ids_T2, paths_TLK = tokens(sum(batches), seed)
    ids, paths = ids_T2.astype(np.int32), paths_TLK.astype(np.int16)
    whole, parts = (PathSample(most, len(LAYERS), K, seed) for _ in range(2))
    whole.add(ids, paths)
    start = 0
    for count in batches:
        parts.add(ids[start : start + count], paths[start : start + count])
        start += count
    one, other = whole.sample(), parts.sample()
    assert np.array_equal(one.ids_P2, other.ids_P2)
    assert np.array_equal(one.paths_PLK, other.paths_PLK)
    assert len(one.ids_P2) == len(one.paths_PLK) == min(most, sum(batches))


def numbered(first: int, count: int) -> RoutingPaths:
    ids = np.arange(first, first + count, dtype=np.int32)
    return RoutingPaths(np.stack([ids, ids], 1), np.zeros((count, 1, K), np.int16))


def test_sample_is_uniform() -> None:
    of_tenth = np.zeros(10)
    for seed in range(200):
        sample = PathSample(50, 1, K, seed)
        sample.add(*numbered(0, 30))
        sample.add(*numbered(30, 970))
        of_tenth += np.bincount(sample.sample().ids_P2[:, 0] // 100, minlength=10)
    assert np.abs(of_tenth / 1000 - 1.0).max() < 0.15  # 1,000 expected, a deviation is 30


def test_merged_sample_weights_parts_by_tokens() -> None:
    one, other = numbered(0, 100), numbered(1000, 100)
    both = merge_samples(one, 9000, other, 1000, 100)
    assert len(both.ids_P2) == 100
    assert 80 <= (both.ids_P2[:, 0] < 1000).sum() <= 98
    whole = merge_samples(numbered(0, 30), 30, numbered(1000, 20), 20, 100)
    assert len(whole.ids_P2) == 50
    large = merge_samples(one, 3 * 10**9, other, 10**9, 100)
    assert 60 <= (large.ids_P2[:, 0] < 1000).sum() <= 90


E2, K2, V2 = SPEC.num_experts, SPEC.top_k, SPEC.vocab_size


def counts_of(tokens: int = 1200, seed: int = 0) -> RoutingCounts:
    random = np.random.default_rng(seed)
    counter = RoutingCounter(FOLDER, SPEC)
    paths = np.argsort(random.random((tokens, len(SPEC.moe_layers), E2)), axis=2)[:, :, :K2]
    counter.add(random.integers(0, V2, (tokens, 2)), paths)
    return counter.counts()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "routing.safetensors"


def test_written_counts_are_read_unchanged(path: Path) -> None:
    counts = counts_of()
    counts.write(path)
    read = RoutingCounts.read(path, FOLDER, SPEC)
    assert arrays_equal(read, counts)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    with pytest.raises(CheckpointError, match="cannot be written"):
        counts.write(path.parent / "no" / "folder")


def test_reader_reports_missing_part_of_profile(path: Path) -> None:
    counts = counts_of()
    counts.write(path)
    with pytest.raises(CheckpointError, match="profile with counts but without predictors"):
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
        torch.equal(again.maps[layer], predictor_profile.maps[layer])
        for layer in SPEC.moe_layers[:-1]
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
        ("load.0", lambda array: array + 5, "load.0: 1200 tokens have 2400 experts"),
        ("load.0", lambda _: np.full(E2, np.nan, np.float32), r"load.0: F32 \[16\], expected I64"),
        (
            "pairs.0",
            put((-1, 0), V2 * E2),
            "pairs.0: a token id is not one of the vocabulary's 4096",
        ),
        ("pairs.4", put((0, 1), 0), "pairs.4: a pair was seen less than once"),
        ("pairs.4", put((1, 0), 0), "pairs.4: pairs are not in ascending order"),
        ("pairs.4", None, "pairs.4: missing"),
        ("paths", put((0, 0, 0), E2), "paths: not all are of 16 experts"),
        ("paths", put((0, 0), 3), "paths: an expert appears twice"),
        ("path_ids", put((0, 1), V2), "path_ids: a token id is not one"),
        ("path_ids", lambda array: array[1:], "path_ids: I32"),
        ("counted", put(0, -5), "counted: -5 is not a token count"),
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


def large(path: Path) -> None:
    pairs_N2 = np.zeros((1 << 23, 2), np.int32)
    write_arrays(path, {**counts_of().arrays(), "pairs.0": pairs_N2})


def long_header(path: Path) -> None:
    path.write_bytes((90 << 20).to_bytes(8, "little"))
    os.truncate(path, 100 << 20)


def cut(path: Path) -> None:
    counts_of().write(path)
    os.truncate(path, path.stat().st_size - 1000)


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


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (large, r"pairs.0: I32 \[8388608, 2\], expected I32 \['at most 1048576', 2\]"),
        (long_header, "truncated or not a safetensors file"),
        (cut, "truncated"),
        (Path.touch, "truncated or not a safetensors file"),
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
