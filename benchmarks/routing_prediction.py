"""How often experts, and their ranks, are foretold from counts of routing, beside the router before
attention: on rows of the profile's sets and on other texts.

    python -m benchmarks.routing_prediction --data DATA                    (about two minutes)

Of the bundled model in float32. Counts: of train rows of its eight sets, as prompts; held out: test
rows of them; others: GSM8K, HumanEval, AG News, BoolQ. Nothing is timed.

Ranks hold experts in order, or as the solver groups them by the profile. T: the rank of most
experts of a token id (the nearest profiled id where it is new). A: the rank that followed those of
the two layers before (Speculative MoE's n-gram over devices, n = 2; at the second layer of one, at
the first the usual rank). surer: that of the two whose part of its counts is larger (Algorithm 2
line 2). early: of most experts of the router before attention. own: the token's own rank of most
experts, the most that any table reaches.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from actors.planning.planner_inputs import layer_routing
from benchmarks.harness import record
from benchmarks.offloaded_decode import BUNDLED, Model
from benchmarks.prediction_texts import HELD_OUT, PROFILE, RoutedTokens, routed, sources, token_rows
from models.prediction.count_predictor import TOKEN, CountPredictor, NearestTokens, hit_fraction
from models.prediction.path_sample import RoutingPaths
from models.prediction.profile_file import checkpoint_digest
from models.prediction.routing_counter import CountedModel, RoutingCounter
from models.prediction.routing_counts import COUNT_LIMITS, CountLimits, RoutingCounts
from models.text.tokenizer_files import tokenizer_digest
from planner.placement.solve import solve_layer

RANKS = (2, 4)
EARLY = "router before attention"
SIZES = (300, 1_000, 10_000, 100_000)  # tokens of smaller profiles
WHOLE = CountLimits(pairs=1 << 20, paths=1 << 20)  # nothing is left out
Ranks = NDArray[np.int64]


class RankGuess(NamedTuple):
    """rank_T, and how sure it is: its part of what was counted."""

    rank_T: Ranks
    sure_T: NDArray[np.float64]

    def or_surer(self, other: RankGuess) -> RankGuess:
        takes = other.sure_T > self.sure_T
        return RankGuess(
            np.where(takes, other.rank_T, self.rank_T), np.where(takes, other.sure_T, self.sure_T)
        )


def counted(model: Model, paths: RoutingPaths) -> RoutingCounts:
    spec = model.spec
    sizes = spec.moe_layers, spec.num_experts, spec.top_k, spec.vocab_size
    counter = RoutingCounter(
        CountedModel(checkpoint_digest(BUNDLED), tokenizer_digest(BUNDLED), *sizes), WHOLE
    )
    counter.add(*paths)
    return counter.counts()


def experts_found(
    counts: RoutingCounts, nearest: NearestTokens, texts: RoutedTokens
) -> dict[str, list[float | None]]:
    """Hit rate by layer, by what is known; None where a layer has none of it."""
    found: dict[str, list[float | None]] = {}
    layers = list(counts.layers)
    for position, layer in enumerate(layers):
        experts_TK = texts.tokens.paths_PLK[:, position]
        guesses = CountPredictor(counts, layer, nearest).predict(texts.tokens)
        hits = {name: hit_fraction(each, experts_TK) for name, each in guesses.items()}
        early_TK = texts.early_PLK[:, position]
        hits[EARLY] = float((early_TK[:, :, None] == experts_TK[:, None, :]).any(2).mean())
        for name, hit in hits.items():
            found.setdefault(name, [None] * len(layers))[position] = round(hit, 4)
    return found


def own_rank(experts_TK: NDArray[Any], of_expert_E: Ranks, ranks: int) -> Ranks:
    """[T] where most of a token's experts are; of equals the one of the expert named first."""
    ranks_TK = of_expert_E[experts_TK]
    votes_TR = (ranks_TK[:, :, None] == np.arange(ranks)).sum(1).astype(float)
    np.add.at(votes_TR, (np.arange(len(ranks_TK)), ranks_TK[:, 0]), 0.5)
    rank_T: Ranks = votes_TR.argmax(1)
    return rank_T


def own_ranks(paths: RoutingPaths, rank_LE: Ranks, ranks: int) -> Ranks:
    """[T, L]"""
    of_layers = enumerate(rank_LE)
    return np.stack([own_rank(paths.paths_PLK[:, n], each, ranks) for n, each in of_layers], 1)


def by_token(
    counts: RoutingCounts,
    layer: int,
    nearest: NearestTokens,
    tokens: RoutingPaths,
    of_expert_E: Ranks,
) -> RankGuess:
    """T."""
    chances_TE = CountPredictor(counts, layer, nearest).predict(tokens)[TOKEN]
    in_rank_ER = np.eye(of_expert_E.max() + 1)[of_expert_E]
    parts_TR = chances_TE @ in_rank_ER / chances_TE.sum(1, keepdims=True)
    return RankGuess(parts_TR.argmax(1), parts_TR.max(1))


def by_ranks_before(profile_PL: Ranks, tokens_TL: Ranks, position: int, ranks: int) -> RankGuess:
    """A. Both: own ranks by layer."""
    looks_back = range(max(0, position - 2), position)

    def key(ranks_TL: Ranks) -> Ranks:
        known = np.zeros(len(ranks_TL), np.int64)
        for earlier in looks_back:
            known = known * ranks + ranks_TL[:, earlier]
        return known

    followed = np.full((ranks ** len(looks_back), ranks), 1e-9)
    np.add.at(followed, (key(profile_PL), profile_PL[:, position]), 1.0)
    parts_TR = (followed / followed.sum(1, keepdims=True))[key(tokens_TL)]
    return RankGuess(parts_TR.argmax(1), parts_TR.max(1))


def in_order(counts: RoutingCounts, ranks: int) -> Ranks:
    """[L, E] the rank of each expert."""
    of_expert_E = np.arange(counts.num_experts) * ranks // counts.num_experts
    return np.tile(of_expert_E, (len(counts.layers), 1))


def grouped(counts: RoutingCounts, ranks: int) -> Ranks:
    """[L, E] as `tandem place` would."""
    slots = counts.num_experts // ranks
    known, lines = counts.truncate(COUNT_LIMITS), []
    for layer in counts.layers:
        placed = solve_layer(layer_routing(known, layer), [slots] * ranks)
        of_expert_E = np.zeros(counts.num_experts, np.int64)
        of_expert_E[list(placed.expert_of_slot)] = np.arange(counts.num_experts) // slots
        lines.append(of_expert_E)
    return np.stack(lines)


def ranks_found(
    counts: RoutingCounts,
    nearest: NearestTokens,
    profile: RoutingPaths,
    texts: RoutedTokens,
    rank_LE: Ranks,
) -> dict[str, dict[str, list[float]]]:
    """right: how often a token's own rank was foretold; LAR; both by layer."""
    tokens, ranks = texts.tokens, int(rank_LE.max()) + 1
    own_PL, own_TL = (own_ranks(paths, rank_LE, ranks) for paths in (profile, tokens))
    found: dict[str, dict[str, list[float]]] = {}
    for position, layer in enumerate(counts.layers):
        of_expert_E = rank_LE[position]
        table = by_token(counts, layer, nearest, tokens, of_expert_E)
        before = by_ranks_before(own_PL, own_TL, position, ranks)
        guesses = {
            "T": table.rank_T,
            "A": before.rank_T,
            "surer": table.or_surer(before).rank_T,
            "early": own_rank(texts.early_PLK[:, position], of_expert_E, ranks),
            "own": own_TL[:, position],
        }
        experts_TK = tokens.paths_PLK[:, position]
        for name, rank_T in guesses.items():
            local = (of_expert_E[experts_TK] == rank_T[:, None]).mean()
            figures = found.setdefault(name, {"right": [], "LAR": []})
            figures["right"].append(round(float((rank_T == own_TL[:, position]).mean()), 4))
            figures["LAR"].append(round(float(local), 4))
    return found


def smaller_profiles(
    model: Model, profile: RoutingPaths, held_out: RoutingPaths, nearest: NearestTokens
) -> dict[str, dict[str, float]]:
    """By tokens of a profile: hit rate by token id, mean over layers, without and with the nearest
    id for one that it lacks, and how many tokens held out these were."""
    order = np.random.default_rng(0).permutation(len(profile.ids_P2))
    found = {}
    for size in (*(each for each in SIZES if each < len(order)), len(order)):
        counts = counted(model, profile.select(order[:size]))
        known = np.unique(counts.layer(model.spec.moe_layers[0]).counts.ids_N)
        means = {
            name: np.mean([
                hit_fraction(CountPredictor(counts, layer, speaks).predict(held_out)[TOKEN],
                             held_out.paths_PLK[:, position])
                for position, layer in enumerate(counts.layers)
            ])
            for name, speaks in (("without", None), ("nearest", nearest))
        }  # fmt: skip
        unseen = float((~np.isin(held_out.ids_P2[:, 0], known)).mean())
        found[f"{size}"] = {name: round(float(mean), 4) for name, mean in means.items()}
        found[f"{size}"]["unseen"] = round(unseen, 4)
    return found


def shown(found: Mapping[str, Mapping[str, Any]]) -> None:
    for texts, rows in found.items():
        print(f"\n{texts}")
        for name, figures in rows.items():
            print(f"  {name:24} {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--tokens", type=int, default=28_000, help="of each set, to profile")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Model()
    nearest = NearestTokens(model.half.embedding)
    texts = {
        name: routed(model, token_rows(model, parts, seed=0))
        for name, parts in sources(options.data, options.tokens)
    }
    profile = texts.pop(PROFILE)
    counts = counted(model, profile.tokens)
    sizes = smaller_profiles(model, profile.tokens, texts[HELD_OUT].tokens, nearest)
    placements = {
        f"{ranks} ranks, {name}": place(counts, ranks)
        for ranks in RANKS
        for name, place in (("in order", in_order), ("grouped", grouped))
    }
    samples: dict[str, Any] = {"profile sizes": sizes}
    for name, each in texts.items():
        samples[f"{name}: experts"] = experts_found(counts, nearest, each)
        for placed, rank_LE in placements.items():
            found = ranks_found(counts, nearest, profile.tokens, each, rank_LE)
            samples[f"{name}: {placed}"] = found
    shown(samples)
    summary = {
        name: {"tokens": len(each.tokens.ids_P2), "texts": each.texts}
        for name, each in {PROFILE: profile, **texts}.items()
    }
    record("routing_prediction", options, samples, summary, model={"name": "bundled"})


if __name__ == "__main__":
    main()
