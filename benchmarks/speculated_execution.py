"""What it costs to run experts that were foretold: the bundled model on texts, every position of
every layer but the first, beside exact routing and *beside random experts*, the yardstick.

    python -m benchmarks.speculated_execution                             (about 3 minutes)
    python -m benchmarks.speculated_execution --input rows.jsonl --rows 50

Texts: the project's own documents, which the model has not seen, unless files are given. kl: to the
exact model's next tokens, mean, in nats; of_random: its part of what random experts cost; same: how
often the most likely next token stays.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.foretelling import add_rows, sources
from benchmarks.harness import record
from benchmarks.offloaded_decode import Model
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.kv_pool import KvPool
from models.experts.moe import expert_sums
from models.experts.router import Routed
from models.foresight.foresight import Foresight
from models.foresight.signals import AFTER, KINDS, Kind, foretold, foretold_after

BLOCK = 16
EXACT, RANDOM = "exact", "random experts"


class Mode(NamedTuple):
    """kind: of guess; "": random experts. weights: as in the configuration. layers: None: all."""

    name: str
    kind: str = ""
    weights: str = "router"
    layers: tuple[int, ...] | None = None


def modes(model: Model) -> list[Mode]:
    later = model.spec.moe_layers[1:]
    found = [Mode(RANDOM)]
    for kind in KINDS:
        found += [Mode(f"{kind}, {w}'s weights", kind, w) for w in ("router", "foretold")]
    found += [Mode(f"after, {w}'s weights", AFTER, w) for w in ("router", "foretold")]
    found += [Mode("hybrid, router's weights", "hybrid")]
    found += [Mode(f"hybrid, layer {layer} alone", "hybrid", layers=(layer,)) for layer in later]
    found += [
        Mode(f"hybrid, all but layer {layer}", "hybrid", layers=tuple(set(later) - {layer}))
        for layer in later
    ]
    return found


class Runner:
    def __init__(self, model: Model) -> None:
        self.model, self._dice = model, torch.Generator().manual_seed(0)
        self._kinds = Foresight(model.half, model.profile)._kind_of  # the hybrid's

    def logits(self, ids: list[int], mode: Mode | None) -> Tensor:
        """[T, V]; mode: None: exact."""
        model, half, last = self.model, self.model.half, -(-len(ids) // BLOCK)
        kv = KvPool(model.spec, last, BLOCK, half.dtype, half.device)
        slices = [SequenceSlice(ids, 0, range(last))]
        inputs = AttentionBatch.build(slices, block_tokens=BLOCK, device=half.device)
        hidden_TD, guessed = half.embed(inputs), None
        for layer in range(model.spec.num_layers):
            attended = half.attend(layer, hidden_TD, inputs, kv)
            hidden_TD, routed = attended.hidden_TD, attended.routed
            assert routed is not None
            if mode is not None and layer and (mode.layers is None or layer in mode.layers):
                routed = self._instead(mode, layer, routed, guessed)
            guessed = self._guess(mode, layer, hidden_TD, routed)
            held = model.experts.held(layer)
            hidden_TD.add_(expert_sums(routed, held, model.identity_E))
            following = layer + 1
            if mode is not None and mode.kind == AFTER and following < model.spec.num_layers:
                guessed = foretold_after(model.half, model.profile, layer, following, hidden_TD)
        return half.logits(hidden_TD)

    def _guess(
        self, mode: Mode | None, layer: int, hidden_TD: Tensor, routed: Routed
    ) -> Routed | None:
        following = layer + 1
        if mode is None or mode.kind in ("", AFTER) or following == self.model.spec.num_layers:
            return None
        hybrid = self._kinds[following] if mode.kind == "hybrid" else mode.kind
        kind: Kind = next(each for each in KINDS if each == hybrid)
        model = self.model
        return foretold(model.half, model.profile, kind, layer, following, hidden_TD, routed)

    def _instead(self, mode: Mode, layer: int, routed: Routed, guessed: Routed | None) -> Routed:
        router = self.model.half.router(layer)
        assert router is not None
        if guessed is None:
            scores_TE = torch.rand(len(routed.x_TD), router.experts, generator=self._dice)
            ids_TK = scores_TE.topk(self.model.spec.top_k).indices
            return Routed(routed.x_TD, ids_TK, routed.topk_weights_TK)
        if mode.weights == "foretold":
            return Routed(routed.x_TD, guessed.topk_ids_TK, guessed.topk_weights_TK)
        return router.weigh(routed.x_TD, guessed.topk_ids_TK)


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = Model()
    runner, wanted = Runner(model), modes(model)
    kl: dict[str, list[float]] = {mode.name: [] for mode in wanted}
    same: dict[str, list[float]] = {mode.name: [] for mode in wanted}
    nll: dict[str, list[float]] = {EXACT: [], **{mode.name: [] for mode in wanted}}
    with torch.inference_mode():
        for ids in (row for _, rows in sources(options, model) for row in rows):
            after_T = torch.tensor(ids[1:])
            exact = runner.logits(ids, None)[:-1].log_softmax(-1)
            nll[EXACT].append(float(functional.nll_loss(exact, after_T)))
            for mode in wanted:
                found = runner.logits(ids, mode)[:-1].log_softmax(-1)
                each = functional.kl_div(found, exact, reduction="batchmean", log_target=True)
                kl[mode.name].append(float(each))
                nll[mode.name].append(float(functional.nll_loss(found, after_T)))
                alike = found.argmax(-1) == exact.argmax(-1)
                same[mode.name].append(float(alike.float().mean()))
    return {"kl": kl, "nll": nll, "same": same}


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    def mean(of: str, name: str) -> float:
        values: list[float] = samples[of][name]
        return statistics.mean(values)

    found: dict[str, Any] = {EXACT: {"nll": round(mean("nll", EXACT), 3)}}
    for name in samples["kl"]:
        found[name] = {
            "nll": round(mean("nll", name), 3),
            "kl": round(mean("kl", name), 4),
            "of_random": round(mean("kl", name) / mean("kl", RANDOM), 3),
            "same": round(mean("same", name), 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rows(parser, 100)
    options = parser.parse_args()
    samples = run(options)
    found = summary(samples)
    for name, row in found.items():
        print(f"{name:40} {row}")
    options.input = [path.name for path in options.input or ()]
    record("speculated_execution", options, samples, found)


if __name__ == "__main__":
    main()
