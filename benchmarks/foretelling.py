"""How often guesses of experts are right on texts that the profile has not seen, by kind of guess,
layer and rank, one to three layers ahead; and how near what a guess is made of is to what the
router sees (cosine).

    python -m benchmarks.foretelling                                               (two minutes)
    python -m benchmarks.foretelling --input imdb.jsonl gsm8k_test.jsonl --field text question \\
        --fit goemotions.jsonl.gz banking77.jsonl.gz

Of the bundled model: one layer ahead with its own profile; two and three with maps and networks
fitted here, on the rows of --fit (the project's own documents, unless given). Texts: other parts of
the documents, unless rows of JSON are given; --field: the first of these that a row has. Rows whose
split is "test" are not fitted on, those of "train" not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import record
from benchmarks.offloaded_decode import Model, texts
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.kv_pool import KvPool
from models.experts.expert_half import expert_sums
from models.experts.router import RoutedTokens
from models.prediction.estimator import EstimatorSamples, train_estimator
from models.prediction.profile_builder import LeastSquares
from models.prediction.routing_profile import RoutingProfile
from models.prediction.signals import (
    AFTER,
    PREDICTOR_KINDS,
    TOKEN,
    features,
    hits_by_rank,
    predicted_routing,
    predicted_routing_after,
    quasi_hidden,
)

ROW_TOKENS, BLOCK, FARTHEST = 256, 16, 3
COSINE = "cosine of "
Rows = list[list[int]]


class LayerActivations(NamedTuple):
    """Of a row at a layer: the residual before and after its experts, and how it was routed."""

    hidden_TD: Tensor
    routed: RoutedTokens
    after_TD: Tensor


def sources(options: argparse.Namespace, model: Model) -> Iterator[tuple[str, Rows]]:
    """By name of the text: rows that are measured."""
    if not options.input:
        yield "documents", texts(model.tokenizer, options.rows, ROW_TOKENS)
    for path in options.input or ():
        rows = _rows(model, path, options.rows, options.field, leave_out="train")
        yield path.name.partition(".")[0], rows


def _rows(model: Model, path: Path, most: int, fields: Sequence[str], *, leave_out: str) -> Rows:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    found: Rows = []
    with opened(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if row.get("split") != leave_out:
                text = next(str(row[field]) for field in fields if field in row)
                found.append(model.tokenizer.encode(text)[:ROW_TOKENS])
            if len(found) == most:
                break
    return [row for row in found if row]


def add_rows(parser: argparse.ArgumentParser, rows: int) -> None:
    """What `sources` asks for, and where the result goes."""
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--input", type=Path, nargs="*", help="files of rows (.jsonl, .jsonl.gz)")
    parser.add_argument("--field", nargs="+", default=["text"], help="the first that a row has")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")


def seen(model: Model, ids: Sequence[int]) -> list[LayerActivations]:
    """By layer."""
    half, last, found = model.half, -(-len(ids) // BLOCK), []
    kv = KvPool(model.spec, last, BLOCK, half.dtype, half.device)
    slices = [SequenceSlice(list(ids), 0, range(last))]
    inputs = AttentionBatch.build(slices, block_tokens=BLOCK, device=half.device)
    hidden_TD = half.embed(inputs)
    for layer in range(model.spec.num_layers):
        attended = half.attend(layer, hidden_TD, inputs, kv)
        assert attended.routed is not None
        sums_TD = expert_sums(attended.routed, model.experts.held(layer), model.identity_E)
        hidden_TD = attended.hidden_TD + sums_TD
        after_TD = hidden_TD.clone()  # the next attention adds to it
        found.append(LayerActivations(attended.hidden_TD, attended.routed, after_TD))
    return found


def fitted(model: Model, rows: Rows, distance: int) -> RoutingProfile:
    """The profile with maps and a network that foretell the layer that comes so many later."""
    half, spec, known = model.half, model.spec, model.profile
    starts = range(spec.num_layers - distance)
    sizes = (spec.hidden_size + spec.num_experts + 1, spec.hidden_size + 1)
    before, after = ({at: LeastSquares(size, spec.num_experts) for at in starts} for size in sizes)
    samples = defaultdict[int, list[EstimatorSamples]](list)
    for ids in rows:
        layers = seen(model, ids)
        for start in starts:
            one, target = layers[start], start + distance
            router = half.router(target)
            assert router is not None
            logits_TE = router.logits(layers[target].routed.x_TD).float()
            before[start].add(features(one.routed, spec.num_experts), logits_TE)
            x_TD = half.mlp_input(target, one.after_TD)
            after[start].add(torch.cat([x_TD, torch.ones(len(x_TD), 1)], 1), logits_TE)
            q_TD = quasi_hidden(known.means[start], one.hidden_TD, one.routed)
            samples[start].append(EstimatorSamples(half.mlp_input(target, q_TD), logits_TE))
    joined = {
        at: EstimatorSamples(*map(torch.cat, zip(*few, strict=True))) for at, few in samples.items()
    }
    return dataclasses.replace(
        known,
        maps={start: each.solve() for start, each in before.items()},
        after={start: each.solve() for start, each in after.items()},
        estimator=train_estimator(joined, spec.num_layers, sigmoid=spec.routing.score == "sigmoid"),
    )


class Measured:
    """Sums over tokens: of hits by rank, and of cosines; [L, K] and [L], by kind and distance."""

    def __init__(self, model: Model) -> None:
        self._model, self._tokens = model, 0
        spec = model.spec
        self._hits = defaultdict[str, Tensor](lambda: torch.zeros(spec.num_layers, spec.top_k))
        self._cosines = defaultdict[str, Tensor](lambda: torch.zeros(spec.num_layers))

    def add(self, known: Sequence[RoutingProfile], ids: Sequence[int]) -> None:
        """known: by distance, from one layer on."""
        layers = seen(self._model, ids)
        self._tokens += len(ids)
        tokens_TK = known[0].tokens_VK[torch.tensor(ids)]
        self._hits[TOKEN][0] += hits_by_rank(tokens_TK, layers[0].routed.topk_ids_TK).sum(0)
        for distance, profile in enumerate(known, 1):
            for start in range(len(layers) - distance):
                self._add(profile, distance, start, layers[start], layers[start + distance].routed)

    def _add(
        self,
        profile: RoutingProfile,
        distance: int,
        start: int,
        one: LayerActivations,
        truth: RoutedTokens,
    ) -> None:
        half, target = self._model.half, start + distance
        found: dict[str, RoutedTokens] = {
            kind: predicted_routing(half, profile, kind, start, target, one.hidden_TD, one.routed)
            for kind in PREDICTOR_KINDS
        }
        found[AFTER] = predicted_routing_after(half, profile, start, target, one.after_TD)
        for kind, routed in found.items():
            hits_TK = hits_by_rank(routed.topk_ids_TK, truth.topk_ids_TK)
            self._hits[f"{kind}, {distance} ahead"][target] += hits_TK.sum(0)
        q_TD = quasi_hidden(profile.means[start], one.hidden_TD, one.routed)
        of = {
            "router": one.routed.x_TD,
            "quasi": half.mlp_input(target, q_TD),
            AFTER: half.mlp_input(target, one.after_TD),
        }
        for kind, x_TD in of.items():
            cosine = functional.cosine_similarity(x_TD, truth.x_TD, dim=-1)
            self._cosines[f"{COSINE}{kind}, {distance} ahead"][target] += cosine.sum()

    def found(self) -> dict[str, Any]:
        """By layer, from the first that the guess is made of: parts right by rank, or the cosine.
        Those of tokens: of the first layer."""
        sums = [*self._hits.items(), *self._cosines.items()]
        means = {name: each / max(1, self._tokens) for name, each in sums}
        return {
            name: each[slice(0, 1) if name == TOKEN else slice(_distance(name), None)].tolist()
            for name, each in means.items()
        }


def _distance(name: str) -> int:
    return int(name.split()[-2])


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text, by_name in samples.items():
        for name, layers in by_name.items():
            row = {"layers": [round(_mean(layer), 2) for layer in layers]}
            if not name.startswith(COSINE):
                row["first guess"] = [round(layer[0], 2) for layer in layers]
            mean = sum(map(_mean, layers)) / len(layers)
            found[f"{text} | {name}"] = {"mean": round(mean, 3), **row}
    return found


def _mean(values: float | Sequence[float]) -> float:
    return values if isinstance(values, float) else sum(values) / len(values)


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, samples = Model(), dict[str, Any]()
    with torch.inference_mode():
        rows: Rows = []
        for path in options.fit or ():
            rows += _rows(model, path, options.fit_rows, options.field, leave_out="test")
        every = texts(model.tokenizer, 4 * options.rows, ROW_TOKENS)  # those measured are others
        rows = rows or [row for number, row in enumerate(every) if number % 4 == 2]
        farther = [fitted(model, rows, distance) for distance in range(2, FARTHEST + 1)]
        for name, measured in sources(options, model):
            sums = Measured(model)
            for ids in measured:
                sums.add([model.profile, *farther], ids)
            samples[name] = sums.found()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rows(parser, 200)
    parser.add_argument("--fit", type=Path, nargs="*", help="files of rows to fit on")
    parser.add_argument("--fit-rows", type=int, default=600, help="of each of them")
    options = parser.parse_args()
    samples = run(options)
    found = summary(samples)
    for name, row in found.items():
        print(f"{name:40} {row}")
    for name in ("input", "fit"):
        setattr(options, name, [path.name for path in getattr(options, name) or ()])
    record("foretelling", options, samples, found)


if __name__ == "__main__":
    main()
