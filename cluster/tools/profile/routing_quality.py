"""How well routing is foretold, and what contiguous experts make of it: on texts that were held
out of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.planning.planner_inputs import layer_routing
from models.prediction.count_predictor import (
    MARGINAL,
    PREVIOUS,
    TOKEN,
    CountPredictor,
    NearestTokens,
    Probabilities,
    bits,
    hit_fraction,
)
from models.prediction.routing_counts import RoutingCounts
from planner.placement.routing import local_fraction, measure
from planner.placement.slots import ExpertPlacement, LayerSlots, contiguous
from planner.placement.token_ranks import shares

RANKS: Final = (2, 4, 8)
_AT_ONCE: Final = 4096  # tokens whose chances are in memory


class LayerQuality(msgspec.Struct, frozen=True):
    """entropy_bits: of an expert that a token goes to, by what is known (`MARGINAL`, `TOKEN`,
    `PREVIOUS`). hit_fraction: of the likeliest K, by what is known, or by kind of guess."""

    layer: int
    entropy_bits: Mapping[str, float]
    hit_fraction: Mapping[str, float]


class RankQuality(msgspec.Struct, frozen=True):
    """Of contiguous experts on so many ranks, means over layers. copies: ranks that a token is sent
    to. local_fraction: LAR by the table of token ids. load: pairs of the busiest rank over the
    mean; worst_load: of the layer where that is largest."""

    ranks: int
    copies: float
    local_fraction: float
    load: float
    worst_load: float


class RoutingQuality(msgspec.Struct, frozen=True):
    """counted, held_out: tokens. ids: different ones that were counted; unseen_fraction: of the
    tokens held out, those of other ids."""

    counted: int
    held_out: int
    ids: int
    unseen_fraction: float
    layers: tuple[LayerQuality, ...]
    ranks: tuple[RankQuality, ...]


def evaluate_routing(
    counts: RoutingCounts,
    held_out: RoutingCounts,
    guesses: Mapping[str, Mapping[int, float]],
    nearest: NearestTokens,
) -> RoutingQuality:
    """guesses: by kind, then layer: how often guesses made of activations were right there."""
    first = next(iter(counts.layers))
    known_ids = np.unique(counts.layer(first).counts.ids_N)
    unseen_P = ~np.isin(held_out.paths.ids_P2[:, 0], known_ids)
    layers = tuple(
        _evaluate_layer(counts, held_out, layer, nearest, guesses) for layer in counts.layers
    )
    even = [ranks for ranks in RANKS if counts.num_experts % ranks == 0]
    return RoutingQuality(
        counted=counts.counted,
        held_out=held_out.counted,
        ids=len(known_ids),
        unseen_fraction=float(unseen_P.mean()) if len(unseen_P) else 0.0,
        layers=layers,
        ranks=tuple(_evaluate_ranks(counts, held_out, ranks, nearest) for ranks in even),
    )


def _evaluate_layer(
    counts: RoutingCounts,
    held_out: RoutingCounts,
    layer: int,
    nearest: NearestTokens,
    guesses: Mapping[str, Mapping[int, float]],
) -> LayerQuality:
    predictions, position = CountPredictor(counts, layer, nearest), list(counts.layers).index(layer)
    sums: dict[str, NDArray[np.float64]] = {}
    tokens = len(held_out.paths.ids_P2)
    for start in range(0, tokens, _AT_ONCE):
        some = held_out.paths.select(np.arange(start, min(tokens, start + _AT_ONCE)))
        experts_TK = some.paths_PLK[:, position]
        for name, chances_TE in predictions.predict(some).items():
            sums[name] = sums.get(name, np.zeros(2)) + _score(chances_TE, experts_TK)
    hits = {name: float(each[0]) / tokens for name, each in sums.items()}
    hits |= {kind: layers[layer] for kind, layers in guesses.items() if layer in layers}
    known = (MARGINAL, TOKEN, PREVIOUS)
    entropies = {name: float(sums[name][1]) / tokens for name in known if name in sums}
    return LayerQuality(layer, entropies, hits)


def _score(chances_TE: Probabilities, experts_TK: NDArray[np.int16]) -> NDArray[np.float64]:
    """Sums over tokens: hits, bits."""
    means = hit_fraction(chances_TE, experts_TK), bits(chances_TE, experts_TK)
    return np.array(means) * len(experts_TK)


def _evaluate_ranks(
    counts: RoutingCounts, held_out: RoutingCounts, ranks: int, nearest: NearestTokens
) -> RankQuality:
    layers = list(counts.layers)
    placed = ExpertPlacement(
        contiguous(counts.num_experts, ranks, num_layers=layers[-1] + 1, moe_layers=counts.layers)
    )
    found = []
    for layer in layers:
        slots, routing = placed.layer(layer), layer_routing(held_out, layer)
        rank_of_id_V = ranks_of_ids(counts, layer, slots, routing.ids_P, nearest)
        measured = measure(routing, slots)
        local = local_fraction(routing, slots, rank_of_id_V)
        found.append((measured.copies, local, measured.load))
    copies, local, load = np.mean(found, axis=0).tolist()
    return RankQuality(ranks, copies, local, load, max(each[2] for each in found))


def ranks_of_ids(
    counts: RoutingCounts,
    layer: int,
    slots: LayerSlots,
    wanted_P: NDArray[np.int64],
    nearest: NearestTokens,
) -> NDArray[np.int64]:
    """By token id, of those wanted: the rank that most of its experts were on; of equals the one
    with more of the layer's load. Speculative MoE's table T."""
    known, ranks = counts.layer(layer).counts, len(slots.bounds)
    held_ER = slots.held(counts.num_experts)
    most = max(known.ids_N.max(initial=0), wanted_P.max(initial=0))
    pairs_VR = np.zeros((most + 1, ranks))
    known_VR = shares(known.ids_N, known.experts_N, known.times_N, held_ER)[:, :-1]
    pairs_VR[: len(known_VR)] = known_VR
    usual_R = counts.layers[layer].load @ held_ER
    rank_of_id_V: NDArray[np.int64] = (pairs_VR + 0.5 * usual_R / max(1, usual_R.sum())).argmax(1)
    wanted = np.unique(wanted_P)
    rank_of_id_V[wanted] = rank_of_id_V[nearest.profiled(wanted, np.unique(known.ids_N))]
    return rank_of_id_V
