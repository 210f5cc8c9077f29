"""Calls of FlashInfer against its signatures, and what they compute against the reference.

PARAMETERS are those of flashinfer-python 0.6.13; an installed package is asked itself.
"""

import importlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kernels import flashinfer_kernels, paged_attention
from kernels.attention_ops import SequenceRows
from kernels.pages import PagedPart, Pages, Seen, plan_paged
from tests.support.kernel_reference import layout

PARAMETERS = {
    ("flashinfer", "BatchPrefillWithPagedKVCacheWrapper", "plan"): (
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads"
        " num_kv_heads head_dim_qk page_size causal sm_scale window_left q_data_type kv_data_type"
        " fixed_split_size"
    ),
    ("flashinfer", "BatchPrefillWithPagedKVCacheWrapper", "run"): "q paged_kv_cache out",
    ("flashinfer", "BatchPrefillWithPagedKVCacheWrapper", "__init__"): (
        "float_workspace_buffer backend"
    ),
    ("flashinfer.attention", "BatchAttentionWithAttentionSinkWrapper", "__init__"): (
        "float_workspace_buffer backend q_data_type kv_data_type head_dim_qk head_dim_vo"
        " window_left"
    ),
    ("flashinfer.mla", "BatchMLAPagedAttentionWrapper", "__init__"): (
        "float_workspace_buffer backend"
    ),
    ("flashinfer.mla", "BatchMLAPagedAttentionWrapper", "plan"): (
        "qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size"
        " causal sm_scale q_data_type kv_data_type"
    ),
    ("flashinfer.mla", "BatchMLAPagedAttentionWrapper", "run"): (
        "q_nope q_pe ckv_cache kpe_cache out"
    ),
    ("flashinfer", "sampling", "top_k_renorm_probs"): "probs top_k",
    ("flashinfer", "sampling", "top_p_renorm_probs"): "probs top_p",
}


@pytest.mark.parametrize("place", PARAMETERS, ids=" ".join)
def test_an_installed_package_has_our_parameters(place: tuple[str, str, str]) -> None:
    module = pytest.importorskip(place[0], reason="flashinfer-python is not installed")
    function = getattr(getattr(module, place[1]), place[2])
    assert set(PARAMETERS[place].split()) <= inspect.signature(function).parameters.keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_an_installed_package_is_right_on_a_gpu() -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    assert flashinfer_kernels.library_on("cuda") is not None
    for kind in ("plain", "sinks", "latent"):
        assert paged_attention._library_attention(kind) is not None


class Wrapper:
    """Stands for FlashInfer's wrappers on the CPU. made: (class, keywords) of all calls."""

    made: ClassVar[list[tuple[str, set[str]]]] = []
    name, module = "BatchPrefillWithPagedKVCacheWrapper", "flashinfer"

    def __init__(self, memory: Tensor, **given: Any) -> None:
        self._check("__init__", {"float_workspace_buffer", *given})
        self._window = given.get("window_left", -1)

    def _check(self, function: str, given: set[str]) -> None:
        known = PARAMETERS.get((self.module, self.name, function))
        if known is None:  # inherited
            known = PARAMETERS["flashinfer", "BatchPrefillWithPagedKVCacheWrapper", function]
        assert given <= set(known.split()), given - set(known.split())
        self.made.append((self.name, given))

    def plan(self, **given: Any) -> None:
        self._check("plan", set(given))
        self._plan = given
        assert given["causal"]

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *extra: Any, out: Tensor) -> None:
        plan, (sinks, scale) = self._plan, extra or (None, self._plan["sm_scale"])
        ends = plan["paged_kv_indptr"].tolist()
        contexts = [
            (end - begin - 1) * plan["page_size"] + last
            for begin, end, last in zip(
                ends, ends[1:], plan["paged_kv_last_page_len"].tolist(), strict=False
            )
        ]
        blocks = plan["paged_kv_indices"], ends
        window = plan["window_left"] + 1
        _attend(q, kv, plan["qo_indptr"].tolist(), contexts, blocks, scale, window, sinks, out)


class SinkWrapper(Wrapper):
    name, module = "BatchAttentionWithAttentionSinkWrapper", "flashinfer.attention"


class LatentWrapper(Wrapper):
    name, module = "BatchMLAPagedAttentionWrapper", "flashinfer.mla"

    def run(  # type: ignore[override]
        self, q: Tensor, turned: Tensor, latents: Tensor, keys: Tensor, *, out: Tensor
    ) -> None:
        plan = self._plan
        entries = torch.cat((latents, keys), -1).unsqueeze(2)
        blocks = plan["kv_indices"], plan["kv_indptr"].tolist()
        ends, contexts = plan["qo_indptr"].tolist(), plan["kv_len_arr"].tolist()
        pools, whole = (entries, entries), torch.cat((q, turned), -1)
        _attend(whole, pools, ends, contexts, blocks, plan["sm_scale"], 0, None, out)


def _attend(
    q: Tensor,
    pools: tuple[Tensor, Tensor],
    ends: list[int],
    contexts: list[int],
    blocks: tuple[Tensor, list[int]],
    scale: float,
    window: int,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    page = pools[0].shape[1]
    for n, context in enumerate(contexts):
        count = ends[n + 1] - ends[n]
        table = blocks[0][blocks[1][n] : blocks[1][n + 1]].int()[None]
        rows = SequenceRows(0, count, context - count)
        group = q.shape[1] // pools[0].shape[2]
        given = slice(ends[n], ends[n + 1])
        for part in plan_paged(
            [(0, rows)], Pages(table, page), Seen(window), group, q.device
        ).parts:
            flat = [pool.flatten(0, 1) for pool in pools]
            paged_attention._attend_by_torch(
                q[given], flat[0], flat[1], part, out[given], scale, sinks
            )


@pytest.fixture
def _library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Wrapper,
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=LatentWrapper),
        attention=SimpleNamespace(BatchAttentionWithAttentionSinkWrapper=SinkWrapper),
    )
    find = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name: library if name == "flashinfer" else find(name)
    )
    monkeypatch.setattr(paged_attention, "library_attention", lambda x, kind: flashinfer_kernels)
    yield
    Wrapper.made.clear()


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("kind", ["plain", "window", "sinks", "latents"])
def test_parts_equal_the_reference(kind: str) -> None:
    """One plan a part, for all layers."""
    generator, is_latent = torch.Generator().manual_seed(1), kind == "latents"
    G, H, d, v = (1, 3, 576, 512) if is_latent else (2, 6, 64, 64)
    laid = layout([(1, 40), (1, 6), (1, 0), (7, 8), (70, 2), (3, 0)])
    k_PGd = torch.randn(laid.pool_slots, G, d, generator=generator)
    v_PGd = k_PGd if is_latent else torch.randn(laid.pool_slots, G, d, generator=generator)
    q_THd = torch.randn(83, H, d, generator=generator)
    sinks_H = torch.randn(H, generator=generator) if kind == "sinks" else None
    seen = Seen(9 if kind == "window" else 0, False, 16)
    plan = plan_paged(list(enumerate(laid.sequences)), laid.pages, seen, H // G, q_THd.device)
    assert len(plan.parts) == 2
    for part in plan.parts:
        found, expected = torch.zeros(83, H, v), torch.zeros(83, H, v)
        given = q_THd, k_PGd, v_PGd, part
        for _ in range(3):
            paged_attention.attend_paged(*given, found, 0.1, sinks_H)
        paged_attention._attend_by_torch(*given, expected, 0.1, sinks_H)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
    names = {"sinks": SinkWrapper.name, "latents": LatentWrapper.name}
    assert [name for name, _ in Wrapper.made] == [names.get(kind, Wrapper.name)] * 4


def part_of(sequences: list[SequenceRows], seen: Seen) -> PagedPart:
    pages = Pages(torch.zeros(len(sequences), 9, dtype=torch.int32), 4)
    return plan_paged(list(enumerate(sequences)), pages, seen, 2, torch.device("cpu")).parts[0]


def test_other_parts_are_left_to_triton() -> None:
    q_THd, rows = torch.empty(3, 4, 64), [SequenceRows(n, 1, 5) for n in (0, 1)]
    supports = flashinfer_kernels.supports
    assert supports(q_THd, 64, part_of(rows, Seen(8)))
    assert not supports(q_THd, 64, part_of(rows, Seen(8, True)))
    assert not supports(q_THd[..., :24], 24, part_of(rows, Seen()))
    apart = [rows[0], SequenceRows(2, 1, 5)]
    assert not supports(q_THd, 64, part_of(apart, Seen()))


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("kind", ["plain", "sinks", "latent"])
def test_a_wrong_library_is_noticed(kind: str) -> None:
    cpu = torch.device("cpu")
    paged_attention._compare(flashinfer_kernels.attend, kind, cpu)

    def wrong(*given: Any) -> None:
        flashinfer_kernels.attend(*given)
        given[4][5] *= 1.1

    with pytest.raises(AssertionError):
        paged_attention._compare(wrong, kind, cpu)


def _kept(probs_NV: Tensor, least_N1: Tensor) -> Tensor:
    kept_NV = probs_NV * (probs_NV >= least_N1)
    return kept_NV / kept_NV.sum(1, keepdim=True)


def _top_p(probs_NV: Tensor, top_p_N: Tensor) -> Tensor:
    sorted_NV = probs_NV.sort(descending=True).values
    kept_NV = sorted_NV.cumsum(1) - sorted_NV < top_p_N.unsqueeze(1)
    return _kept(probs_NV, sorted_NV.where(kept_NV, torch.inf).amin(1, keepdim=True))


def test_tokens_are_drawn_of_those_that_the_library_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def top_k(probs_NV: Tensor, top_k: int) -> Tensor:
        return _kept(probs_NV, probs_NV.topk(top_k).values[:, -1:])

    library: Any = SimpleNamespace(top_k_renorm_probs=top_k, top_p_renorm_probs=_top_p)
    flashinfer_kernels._check_sampling(library, "cpu")
    monkeypatch.setattr(flashinfer_kernels, "library_on", lambda kind: library)
    logits_NV = torch.tensor([[1.0, 3.0, 2.0], [1.0, torch.nan, 0.0]])
    found_NV = flashinfer_kernels.top_probs(logits_NV, 3, torch.tensor([0.0, 0.5]))
    assert (found_NV[0] > 0.0).tolist() == [False, True, False]
    assert found_NV[1].isfinite().all()
    library.top_p_renorm_probs = lambda probs_NV, top_p_N: probs_NV
    with pytest.raises(AssertionError):
        flashinfer_kernels._check_sampling(library, "cpu")
