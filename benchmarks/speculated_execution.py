"""What it costs to run experts that were foretold: the bundled model on texts, every position of
every layer but the first, beside exact routing and *beside random experts*, the yardstick; and
chats whose prompts are exact and whose answers are not.

    python -m benchmarks.speculated_execution                             (about 3 minutes)
    python -m benchmarks.speculated_execution --data DATA --rows 14       (about 5 minutes)
    python -m benchmarks.speculated_execution --input rows.jsonl --rows 50

Texts: the project's own documents, which the model has not seen, unless files are given, or with
--data test rows of each task, posed as the model was trained; DATA is the folder with
`classification/*.jsonl`. kl: to the exact model's next tokens, mean over positions, in nats;
of_random: its part of what random experts cost; same: how often the most likely next token stays;
right: chats with exactly the answer that was taught; like exact: with the answer of exact routing.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.foretelling import ROW_TOKENS, add_rows, sources
from benchmarks.harness import record
from benchmarks.offloaded_decode import Model
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.kv_pool import KvPool
from models.experts.expert_half import expert_sums
from models.experts.router import RoutedTokens
from models.prediction.expert_predictor import ExpertPredictor
from models.prediction.signals import (
    AFTER,
    PREDICTOR_KINDS,
    PredictorKind,
    predicted_routing,
    predicted_routing_after,
)
from training.bundled.chat import expected_answer
from training.bundled.tasks import TASKS, prompt_of, read_rows

BLOCK, MOST_ANSWERED = 16, 64
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
    for kind in PREDICTOR_KINDS:
        found += [Mode(f"{kind}, {w}'s weights", kind, w) for w in ("router", "predicted")]
    found += [Mode(f"after, {w}'s weights", AFTER, w) for w in ("router", "predicted")]
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
        self._kinds = ExpertPredictor(model.half, model.profile)._kind_of  # the hybrid's

    def logits(self, ids: list[int], mode: Mode | None) -> Tensor:
        """[T, V]; mode: None: exact."""
        return self._pass(ids, 0, self._kv(len(ids)), mode)

    def answer(self, prompt: list[int], mode: Mode | None) -> list[int]:
        """Greedy, of at most MOST_ANSWERED tokens; the prompt is exact."""
        kv, said = self._kv(len(prompt) + MOST_ANSWERED), list[int]()
        logits_TV = self._pass(prompt, 0, kv, None)
        while len(said) < MOST_ANSWERED:
            token = int(logits_TV[-1].argmax())
            if token in self.model.spec.eos_token_ids:
                break
            said.append(token)
            logits_TV = self._pass([token], len(prompt) + len(said) - 1, kv, mode)
        return said

    def _kv(self, tokens: int) -> KvPool:
        half = self.model.half
        return KvPool(self.model.spec, -(-tokens // BLOCK), BLOCK, half.dtype, half.device)

    def _pass(self, ids: list[int], first: int, kv: KvPool, mode: Mode | None) -> Tensor:
        """Logits [T, V] of tokens that stand behind `first` others."""
        model, half = self.model, self.model.half
        slices = [SequenceSlice(ids, first, range(-(-(first + len(ids)) // BLOCK)))]
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
                guessed = predicted_routing_after(
                    model.half, model.profile, layer, following, hidden_TD
                )
        return half.logits(hidden_TD)

    def _guess(
        self, mode: Mode | None, layer: int, hidden_TD: Tensor, routed: RoutedTokens
    ) -> RoutedTokens | None:
        following = layer + 1
        if mode is None or mode.kind in ("", AFTER) or following == self.model.spec.num_layers:
            return None
        hybrid = self._kinds[following] if mode.kind == "hybrid" else mode.kind
        kind: PredictorKind = next(each for each in PREDICTOR_KINDS if each == hybrid)
        model = self.model
        return predicted_routing(
            model.half, model.profile, kind, layer, following, hidden_TD, routed
        )

    def _instead(
        self, mode: Mode, layer: int, routed: RoutedTokens, guessed: RoutedTokens | None
    ) -> RoutedTokens:
        router = self.model.half.router(layer)
        assert router is not None
        if guessed is None:
            scores_TE = torch.rand(len(routed.x_TD), router.experts, generator=self._dice)
            ids_TK = scores_TE.topk(self.model.spec.top_k).indices
            return RoutedTokens(routed.x_TD, ids_TK, routed.topk_weights_TK)
        if mode.weights == "predicted":
            return RoutedTokens(routed.x_TD, guessed.topk_ids_TK, guessed.topk_weights_TK)
        return router.weigh(routed.x_TD, guessed.topk_ids_TK)


class Measured(NamedTuple):
    """Of a mode on a row: means over its positions."""

    kl: float
    nll: float
    same: float


def measure(runner: Runner, mode: Mode, ids: list[int], exact: Tensor) -> Measured:
    """exact: the model's own log-probabilities, [T - 1, V]: nothing comes after the last token."""
    after_T, found = torch.tensor(ids[1:]), runner.logits(ids, mode)[:-1].log_softmax(-1)
    kl = functional.kl_div(found, exact, reduction="batchmean", log_target=True)
    alike = found.argmax(-1) == exact.argmax(-1)
    nll = functional.nll_loss(found, after_T)
    return Measured(float(kl), float(nll), float(alike.float().mean()))


class Chat(NamedTuple):
    prompt: list[int]
    taught: str


def chats(model: Model, data: Path, count: int) -> list[Chat]:
    """Of random test rows, evenly over tasks."""
    dice, found = random.Random(0), []
    for task in TASKS:
        rows = read_rows(task, data, "test")
        for row in dice.sample(rows, min(-(-count // len(TASKS)), len(rows))):
            asked = dice.choice(task.chat_questions).format(body=row.prefix + row.text)
            prompt = model.tokenizer.encode_chat([{"role": "user", "content": asked}])
            found.append(Chat(prompt, expected_answer(task, row)))
    return found


def answers(runner: Runner, mode: Mode | None, asked: Sequence[Chat]) -> list[str]:
    return [runner.model.tokenizer.decode(runner.answer(chat.prompt, mode)) for chat in asked]


def posed_rows(model: Model, data: Path, each: int) -> list[list[int]]:
    """Test rows of every task, as the model was trained on them."""
    return [
        model.tokenizer.encode(prompt_of(task, row))[:ROW_TOKENS]
        for task in TASKS
        for row in read_rows(task, data, "test")[:each]
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = Model()
    runner, wanted = Runner(model), modes(model)
    rows = [row for _, some in sources(options, model) for row in some]
    asked: list[Chat] = []
    if options.data is not None:
        rows = posed_rows(model, options.data, options.rows)
        asked = chats(model, options.data, options.chats)
    samples: dict[str, Any] = {"tokens": [len(ids) - 1 for ids in rows], EXACT: {"nll": []}}
    samples |= {mode.name: {name: [] for name in Measured._fields} for mode in wanted}
    with torch.inference_mode():
        for ids in rows:
            exact = runner.logits(ids, None)[:-1].log_softmax(-1)
            samples[EXACT]["nll"].append(float(functional.nll_loss(exact, torch.tensor(ids[1:]))))
            for mode in wanted:
                found = measure(runner, mode, ids, exact)
                for name, value in found._asdict().items():
                    samples[mode.name][name].append(value)
        for name, row in chatted(runner, wanted, asked).items() if asked else ():
            samples[name] |= row
    return samples


def chatted(runner: Runner, wanted: Sequence[Mode], asked: Sequence[Chat]) -> dict[str, Any]:
    """By mode: which chats are right, and which are answered as exact routing does."""
    said = {EXACT: answers(runner, None, asked)}
    said |= {mode.name: answers(runner, mode, asked) for mode in wanted}
    return {
        name: {
            "right": [float(a == chat.taught) for a, chat in zip(each, asked, strict=True)],
            "like exact": [float(a == b) for a, b in zip(each, said[EXACT], strict=True)],
        }
        for name, each in said.items()
    }


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    tokens: list[int] = samples["tokens"]

    def mean(name: str, of: str) -> float:
        values: list[float] = samples[name][of]
        weights = tokens if of in Measured._fields else [1] * len(values)
        return statistics.fmean(values, weights)

    found: dict[str, Any] = {}
    for name in samples.keys() - {"tokens"}:
        found[name] = {of: round(mean(name, of), 4) for of in samples[name]}
        if name != EXACT:
            found[name]["of_random"] = round(mean(name, "kl") / mean(RANDOM, "kl"), 3)
    return {name: found[name] for name in samples if name in found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rows(parser, 100)
    parser.add_argument("--data", type=Path, help="folder of the data sets: posed rows, and chats")
    parser.add_argument("--chats", type=int, default=200, help="with --data")
    options = parser.parse_args()
    samples = run(options)
    found = summary(samples)
    for name, row in found.items():
        print(f"{name:40} {row}")
    options.input = [path.name for path in options.input or ()]
    options.data = None if options.data is None else options.data.name
    record("speculated_execution", options, samples, found)


if __name__ == "__main__":
    main()
