"""Tokens that prefill workers compute for rows with shared prefixes, beside the least possible.

    python -m benchmarks.shared_work --data DATA [--rows N] [--sets mmlu …]

The least: the nodes of the trie of all prompts, each token computed once wherever prompts agree up
to it. Computed: what the workers' batches held. The model has random weights and is tiny, because
counts do not depend on it; the tokenizer, the rows, the workers and the router are real. Sharing by
whole blocks (kv.share_partial_blocks=false) stands beside sharing to the token, one worker beside
two behind the router, and rows in the order of the file beside rows sorted as the bulk job does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.harness import record
from benchmarks.random_checkpoint import MEDIUM, write_random_checkpoint
from benchmarks.router_workloads import TOKENIZER
from cluster.classification.bounded import map_bounded
from cluster.fleet.codec import Directory
from cluster.routing.pipelines import Pipelines
from cluster.serving.ingress_app import pipelines
from contracts.config import TandemConfig
from contracts.loading import config_from
from contracts.messages import Scored, Submit
from contracts.requests import Priority
from tests.support.local_group import LocalGroup
from training.bundled.tasks import raw_rows

SETS = ("mmlu", "quality", "moral_stories", "rt_polarity")
IN_FLIGHT_PER_WORKER = 512  # as the bulk job has
STRIDE = 101  # token ids of run n are moved by n times this: runs do not find each other's blocks
# Attention to 4,000 tokens is about half of a token's work, as in MEDIUM: the router counts it.
TINY: dict[str, Any] = {
    **MEDIUM,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 256,
    "vocab_size": 50432,
    "max_position_embeddings": 16384,
    "torch_dtype": "float32",
}

Prompts = list[list[int]]


class Variant(NamedTuple):
    workers: int
    to_the_token: bool

    @property
    def name(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{workers}, {'to the token' if self.to_the_token else 'whole blocks'}"


VARIANTS = (Variant(1, False), Variant(1, True), Variant(2, False), Variant(2, True))


def main() -> None:
    options = _options()
    tokenizer = Tokenizer.from_file(str(options.data / TOKENIZER))
    sets = {name: _prompts(options.data, name, tokenizer, options.rows) for name in options.sets}
    samples: dict[str, Any] = {}
    for variant in VARIANTS:
        samples[variant.name] = asyncio.run(_run_all(variant, sets, options.pool_tokens))
    summary = {name: _summary(prompts, name, samples) for name, prompts in sets.items()}
    _show(summary)
    record("shared_work", options, samples, summary, model=TINY)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the shared data")
    parser.add_argument("--sets", nargs="+", default=list(SETS), metavar="SET")
    parser.add_argument("--rows", type=int, default=1 << 30, help="of each set, the first N")
    parser.add_argument("--pool-tokens", type=int, default=1 << 16, help="KV pool of a worker")
    parser.add_argument("--output", type=Path, default=None)
    return parser.parse_args()


def _prompts(data: Path, name: str, tokenizer: Tokenizer, rows: int) -> Prompts:
    """A set's prompts, in the order of its file."""
    file = data / f"classification/{name}.jsonl"
    found = raw_rows(file if file.exists() else file.with_suffix(".jsonl.gz"))
    texts = [row.get("prefix", "") + row["text"] for row in itertools.islice(found, rows)]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def least_tokens(prompts: Prompts) -> int:
    """Nodes of the trie of all prompts."""
    nodes, before = 0, list[int]()
    for prompt in sorted(prompts):
        nodes += len(prompt) - _common(prompt, before)
        before = prompt
    return nodes


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    shorter = min(len(left), len(right))
    return next((index for index, (one, other) in pairs if one != other), shorter)


async def _run_all(
    variant: Variant, sets: dict[str, Prompts], pool_tokens: int
) -> dict[str, dict[str, float]]:
    """Tokens computed, and seconds, per set and order."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, _group(variant, folder, pool_tokens) as group:
        backend = pipelines(group.config, group.directory)
        backend.start()
        try:
            await backend.wait_ready()
            runs = [(name, order) for name in sets for order in ("file", "sorted")]
            for number, (name, order) in enumerate(runs):
                prompts = sets[name] if order == "file" else sorted(sets[name])
                moved = [
                    [(token + number * STRIDE) % TINY["vocab_size"] for token in p] for p in prompts
                ]
                started_s, before = time.perf_counter(), group.computed_tokens()
                cached = await _score(backend, moved, IN_FLIGHT_PER_WORKER * variant.workers)
                seconds = time.perf_counter() - started_s
                computed = group.computed_tokens() - before
                _check(computed, sum(map(len, moved)) - cached, name)
                found.setdefault(name, {})[order] = computed
                found[name][f"{order}_s"] = round(seconds, 2)
                print(f"{variant.name}: {name}, {order} order: {computed} tokens, {seconds:.1f} s")
        finally:
            await backend.close()
    return found


def _check(computed: int, uncached: int, name: str) -> None:
    if computed != uncached:
        raise SystemExit(f"{name}: {computed} tokens computed, the answers say {uncached}")


async def _score(backend: Pipelines, prompts: Prompts, limit: int) -> int:
    """Cached tokens of all prompts, as the answers state them."""

    async def score(prompt: list[int]) -> Scored:
        job = Submit(
            request_id=0,
            token_ids=prompt,
            sampling=None,
            priority=Priority.BE,
            candidates=[0, 1],
        )
        return await backend.score(job, wait_for_slot=True)

    answers = await map_bounded(score, prompts, limit)
    return sum(answer.usage.cached_tokens for answer in answers)


class _Workers(NamedTuple):
    config: TandemConfig
    group: LocalGroup

    @property
    def directory(self) -> Directory:
        return Directory(
            client_addresses={},
            prefill_addresses=self.group.client_addresses,
            token=self.group.token,
            backend="shm",
            epoch=1,
            ranks=self.group.ready,
        )

    def computed_tokens(self) -> int:
        totals = (status.sections["totals"] for status in self.group.status())
        return int(sum(total["computed_tokens"] for total in totals))


@contextmanager
def _group(variant: Variant, folder: str, pool_tokens: int) -> Iterator[_Workers]:
    write_random_checkpoint(Path(folder), TINY)
    tree = {
        "model": {"path": folder, "dtype": "float32"},
        "groups": {"attention_ranks": 0, "expert_ranks": 0, "prefill_ranks": variant.workers},
        "kv": {"pool_tokens": pool_tokens, "share_partial_blocks": variant.to_the_token},
    }
    config = config_from(tree, source="benchmark")
    with LocalGroup(folder, config) as group:
        yield _Workers(config, group)


def _summary(prompts: Prompts, name: str, samples: dict[str, Any]) -> dict[str, Any]:
    least = least_tokens(prompts)
    over = {
        f"{variant}, {order} order": round(100 * (runs[name][order] / least - 1), 3)
        for variant, runs in samples.items()
        for order in ("file", "sorted")
    }
    return {
        "rows": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "least_tokens": least,
        "percent_above_least": over,
    }


def _show(summary: dict[str, Any]) -> None:
    table = Table("tokens computed, % above the least", *summary, title="Shared prefixes")
    for what in ("rows", "prompt_tokens", "least_tokens"):
        table.add_row(what, *(f"{found[what]:,}" for found in summary.values()))
    first = next(iter(summary.values()))
    for variant in first["percent_above_least"]:
        cells = (f"{found['percent_above_least'][variant]:.2f}" for found in summary.values())
        table.add_row(variant, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
