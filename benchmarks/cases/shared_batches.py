"""Batches that prefill workers compute together; tokens/s within five times the shortest's time.

    python -m benchmarks shared_batches --data DATA

Two workers with a computing thread each, float32. Schemes and predictions: bundled checkpoint, test
texts of its tasks; threads, with a link of --mib MiB/s in each direction. Long prompt: a random
checkpoint of 120 M parameters; processes over shared memory with a core each.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from actors.channels.endpoint import Endpoint
from actors.gather.group_exchange import GroupCall
from actors.planning.planner_inputs import layer_routing
from benchmarks.cases.shared_load import Arrival, running
from benchmarks.harness import Measured, Table, documented_case, table_of
from benchmarks.placement.traces import BUNDLED, rows_of
from benchmarks.support.random_checkpoint import MEDIUM, write_random_checkpoint
from benchmarks.support.shared_workers import BLOCK_TOKENS, LimitedLink, SharedWorkers
from contracts.placement import Placement
from kernels.steps import run_to_end
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.experts.expert_half import RoutedTokens, expert_sum_steps
from models.prediction.routing_counts import RoutingCounts
from models.spec.checkpoint_files import ROUTING
from models.text.tokenizer import Tokenizer
from planner.arrays import Ints
from planner.placement.routing import LayerRouting
from planner.placement.shuffling import ShareTables, main_workers, share_tables, shuffled_order
from planner.placement.slots import contiguous_line, held
from planner.placement.solve import solve_layer
from planner.schedule.batch_choice import ExchangeScheme, moved_rows
from tests.support.local_model import LocalModel

SCHEMES = (
    ExchangeScheme.ALL_REDUCE,
    ExchangeScheme.REDUCE_SCATTER,
    ExchangeScheme.SHUFFLED,
    ExchangeScheme.TENSOR_PARALLEL,
)
LOCAL_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
MODES = (("resident", 1), ("gathered", 2), ("all_to_all", 2), ("shuffled", 2))
WORKERS = 2
TEXTS = (1, 2, 4, 8, 12)  # of a batch, beside all
Texts = Sequence[Sequence[int]]


def schemes(
    model: LocalModel, routing: Sequence[LayerRouting], texts: Texts, options: argparse.Namespace
) -> dict[str, Any]:
    """Return rows, model dims and seconds of each scheme, with experts in order and grouped.

    tokens/s: of the largest batch that takes at most five times as long as the shortest text with
    the first scheme: the objective of Speculative MoE, Section 5.3.
    """
    found, E, objective_s = dict[str, Any](), model.spec.num_experts, 0.0
    sizes = (E // WORKERS,) * WORKERS
    plain = [contiguous_line(each.load(), sizes) for each in routing]
    grouped = [solve_layer(each, sizes) for each in routing]
    batches = [texts[:count] for count in TEXTS if count < len(texts)] + [texts]
    tokens = [sum(map(len, each)) for each in batches]
    for name, lines in (("", plain), (", grouped", grouped)):
        workers = SharedWorkers(
            BUNDLED,
            model,
            Placement(num_experts=E, slots_per_rank=sizes, expert_of_slot=tuple(lines)),
        )
        table = share_tables(routing[0].counts, [(routing[0].sets_PK, held(lines[0], sizes, E))])
        for scheme in SCHEMES:
            link, medians = LimitedLink(options.mib * 2**20), list[float]()
            with patch.object(Endpoint, "reserve", lambda *a, link=link: link.reserve(*a)):
                for batch in batches:
                    call, seconds = _call(batch, scheme, table), list[float]()
                    for number in range(options.passes + 1):
                        link.sent_bytes, before = 0, workers.copies
                        seconds.append(workers.run(call, number + 1))
                    medians.append(statistics.median(seconds[1:]))
            each = tokens[-1] * len(routing)
            rows = moved_rows(scheme, WORKERS, (workers.copies - before) / each)
            dims = link.sent_bytes / each / (4 * model.spec.hidden_size)
            objective_s = objective_s or 5 * medians[0]
            found[f"{scheme}{name}"] = {
                "rows": rows,
                "dims": dims,
                "seconds": seconds[1:],
                "tokens/s": float(np.interp(objective_s, medians, tokens)) / objective_s,
            }
        workers.close()
    return found


def _call(texts: Texts, scheme: ExchangeScheme, table: ShareTables) -> GroupCall:
    slices, blocks = list[SequenceSlice](), 0
    for ids in texts:
        count = -(-len(ids) // BLOCK_TOKENS)
        slices.append(SequenceSlice(list(ids), 0, list(range(blocks, blocks + count))))
        blocks += count
    order = b""
    if scheme is ExchangeScheme.SHUFFLED:
        ids_T = np.array([token for ids in texts for token in ids])
        order = shuffled_order(table.predict(ids_T, None)).astype(np.int32).tobytes()
    return GroupCall(
        slices=slices,
        layer=0,
        counts=None,
        first_order=order,
        scheme=scheme,
        keeps_kv=False,
        nodes=[0] * WORKERS,
    )


def expert_layer(model: LocalModel, options: argparse.Namespace) -> dict[str, Any]:
    """Return the ms of one layer's experts, and copies of a token, by the share of local pairs."""
    E, layer, found = model.spec.num_experts, model.spec.moe_layers[0], dict[str, Any]()
    sizes = (E // WORKERS,) * WORKERS
    lines = (tuple(range(E)),) * len(model.spec.moe_layers)
    placement = Placement(num_experts=E, slots_per_rank=sizes, expert_of_slot=lines)
    workers = SharedWorkers(BUNDLED, model, placement)
    for share in LOCAL_SHARES:
        routed = [_routed(model, rank, share, options.layer_tokens) for rank in range(WORKERS)]
        link, ms = LimitedLink(options.mib * 2**20), list[float]()
        with patch.object(Endpoint, "reserve", lambda *a, link=link: link.reserve(*a)):
            for number in range(options.passes + 1):
                before = workers.copies
                ms.append(1e3 * workers.run_experts(layer, routed, number + 1))
        copies = (workers.copies - before) / WORKERS / options.layer_tokens
        found[f"local | {share}"] = {"copies": copies, "ms": ms[1:]}
    workers.close()
    return found


def _routed(model: LocalModel, rank: int, share: float, tokens: int) -> RoutedTokens:
    """Return a worker's tokens with random experts, a share of them on the worker itself."""
    K, each = model.spec.top_k, model.spec.num_experts // WORKERS
    generator = np.random.default_rng(0)
    own_TK, other_TK = (
        generator.random((tokens, each)).argsort(1)[:, :K] + worker * each
        for worker in (rank, 1 - rank)
    )
    ids_TK = np.where(generator.random((tokens, K)) < share, own_TK, other_TK)
    return RoutedTokens(
        torch.zeros(tokens, model.spec.hidden_size),
        torch.from_numpy(ids_TK),
        torch.full((tokens, K), 1 / K),
    )


def long_prompt(folder: Path, tokens: int, mode: str, workers: int, passes: int) -> list[float]:
    """Return the seconds of one prompt at a time, after the first ones; a core for each worker."""
    with running(folder, mode, workers=workers) as group:
        return [group.play([Arrival(0.0, tokens, 0)])[0] for _ in range(passes + 4)][4:]


def predictions(model: LocalModel, routing: Sequence[LayerRouting], texts: Texts) -> dict[str, Any]:
    """Return the fraction of tokens, by layer, whose predicted worker holds no fewer experts."""
    E, half, hits = model.spec.num_experts, model.attention, dict[str, list[list[bool]]]()
    sizes = (E // WORKERS,) * WORKERS
    holds_EW = held(contiguous_line(routing[0].load(), sizes), sizes, E)
    known = [(each.sets_PK, holds_EW) for each in routing]
    for ids in texts:
        batch = AttentionBatch.build([SequenceSlice(ids, 0, range(len(ids)))], block_tokens=16)
        hidden_TD, kv, before = half.embed(batch), model.new_pool(len(ids)), list[Ints]()
        for layer, each in enumerate(routing):
            router = half.router(layer)
            assert router is not None
            ahead_TK = router(half.mlp_input(layer, hidden_TD)).topk_ids_TK.numpy()
            routed = half.attend(layer, hidden_TD, batch, kv).routed
            assert routed is not None
            local = model._local_of_E[0][layer]
            hidden_TD += run_to_end(
                expert_sum_steps(routed, model.experts[0].layer_experts(layer), local)
            )
            actual_TK = routed.topk_ids_TK.numpy()
            table = share_tables(each.counts, known[max(0, layer - 2) : layer + 1])
            guesses = {
                "token table": table.predict(np.array(ids), None).argmax(1),
                "router before attention": main_workers(ahead_TK, holds_EW),
            }
            if table.of_two_AW is not None:
                two_T2 = np.stack(before[-2:], 1)
                guesses["two layers before"] = table.of_two_AW[two_T2 @ [WORKERS, 1]].argmax(1)
                guesses["the surer of both"] = table.predict(np.array(ids), two_T2).argmax(1)
            held_TW = holds_EW[actual_TK].sum(1)
            for name, guess_T in guesses.items():
                right_T = held_TW[np.arange(len(ids)), guess_T] == held_TW.max(1)
                hits.setdefault(name, [[] for _ in routing])[layer] += right_T.tolist()
            before.append(main_workers(actual_TK, holds_EW))
    return {
        f"hits | {name}": {f"layer {n}": float(np.mean(row)) for n, row in enumerate(rows) if row}
        for name, rows in hits.items()
    }


def measure(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(1)
    model = LocalModel.load(BUNDLED, dtype="float32")
    texts = rows_of(options.data, "test", Tokenizer.load(BUNDLED))[: options.texts]
    counts = RoutingCounts.read(BUNDLED / ROUTING, BUNDLED, model.spec)
    routing = [layer_routing(counts, layer) for layer in model.spec.moe_layers]
    samples = schemes(model, routing, sorted(texts[: options.rows], key=len), options)
    samples |= expert_layer(model, options)
    with TemporaryDirectory() as scratch:
        folder = write_random_checkpoint(Path(scratch), {**MEDIUM, "torch_dtype": "float32"})
        for mode, workers in MODES:
            seconds = long_prompt(folder, options.tokens, mode, workers, options.passes)
            samples[f"prompt | {mode}"] = {"seconds": seconds}
    summary: dict[str, Any] = {
        name: {
            key: statistics.median(each) if isinstance(each, list) else each
            for key, each in row.items()
        }
        for name, row in samples.items()
    }
    return Measured(samples, summary | predictions(model, routing, texts))


def tables(summary: dict[str, Any]) -> list[Table]:
    dims = {name: row for name, row in summary.items() if "dims" in row}
    columns = "dims", "seconds", "tokens/s"
    hits = {name[7:]: row for name, row in summary.items() if name.startswith("hits | ")}
    prompt = {mode: summary[f"prompt | {mode}"] for mode, _ in MODES}
    layers = tuple(hits["token table"])
    local = {name[8:]: row for name, row in summary.items() if name.startswith("local | ")}
    return [
        table_of(dims, "Schemes, limited link", "scheme", columns),
        table_of(local, "Expert layer, limited link", "local share", ("copies", "ms")),
        table_of(prompt, "One long prompt", "experts", ("seconds",)),
        table_of(hits, "Predicted workers", "prediction", layers),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=100, help="that predictions are judged on")
    parser.add_argument("--rows", type=int, default=20, help="texts of a batch")
    parser.add_argument("--tokens", type=int, default=1500, help="of the long prompt")
    parser.add_argument("--layer-tokens", type=int, default=256, help="of each worker's layer")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--mib", type=float, default=8.0, help="MiB/s of the limited link")


CASE = documented_case(__doc__, "Batches computed together", measure, tables, add_options)
