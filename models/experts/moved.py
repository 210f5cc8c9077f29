"""The experts of an expert rank, put together anew: those that stay are shared, not copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from kernels.linear import Linear, Linears, Product
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import ExpertLayer, clamped_gate, joined
from models.experts.moe import ExpertHalf

Key = tuple[int, int]  # layer, expert


def lacking(half: ExpertHalf, ids_of: Mapping[int, Sequence[int]]) -> list[Key]:
    """Of `ids_of`, by layer, those that `half` has not."""
    return [
        (layer, expert)
        for layer, ids in ids_of.items()
        for expert in ids
        if expert not in half.expert_ids[layer]
    ]


def with_experts(
    half: ExpertHalf, ids_of: Mapping[int, Sequence[int]], brought: Mapping[Key, ExpertLayer]
) -> ExpertHalf:
    """The half of `ids_of`, each of which `half` has, or `brought` by itself."""
    return ExpertHalf(
        half.spec,
        ids_of,
        {layer: joined(_each(half, layer, ids, brought)) for layer, ids in ids_of.items()},
    )


def expert_of(half: ExpertHalf, layer: int, expert: int) -> ExpertLayer | None:
    """It alone; None: `half` has it not."""
    ids = half.expert_ids.get(layer, ())
    if expert not in ids:
        return None
    local, held = ids.index(expert), half.held(layer)
    return ExpertLayer(_one(held.gate_up, local), _one(held.down, local), held.clamped)


class PackedExpert:
    """One expert whose bytes are written as they stand in memory. memory: of its matrices, then of
    its biases, to be filled before it is used."""

    def __init__(self, layout: ExpertLayout) -> None:
        biases = [bias[0] for bias in layout.empty_biases(1)]
        products = [
            layout.new_linear(matrix, biases[matrix] if biases else None) for matrix in (0, 1)
        ]
        self.memory = packed_memory(products)
        gate_up, down = (Linears([product], None) for product in products)
        self.layer = ExpertLayer(gate_up, down, clamped_gate(layout.spec))


def packed_memory(products: Iterable[Product]) -> list[Tensor]:
    """Of packed products: their matrices, then their biases."""
    linears = [product for product in products if isinstance(product, Linear)]
    return [
        *(linear.memory for linear in linears),
        *(linear.bias for linear in linears if linear.bias is not None),
    ]


def _each(
    half: ExpertHalf, layer: int, ids: Sequence[int], brought: Mapping[Key, ExpertLayer]
) -> list[ExpertLayer]:
    found = []
    for expert in ids:
        each = brought.get((layer, expert)) or expert_of(half, layer, expert)
        if each is None:
            raise KeyError(f"expert {expert} of layer {layer} was neither here nor brought in")
        found.append(each)
    return found


def _one(products: Linears, local: int) -> Linears:
    return Linears([products[local]], None)
