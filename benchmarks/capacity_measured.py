"""Is what the board *Capacity* says true? Ranks are processes with a fixed quota of a core each
(cgroup v1, root), so that another one brings its own. As much comes as there is room for, before so
many ranks and before one more of each kind; and before fresh ranks, which know nothing of that, a
part of it: those, or their planner, say how much would go, and what another one would add.

    python -m benchmarks.capacity_measured [--generating] [--quota 0.25] [--light 0.33]

Rows to classify before one prefill worker and two; with --generating requests before one attention
and one expert rank (--ranks), and one more of either. What goes is counted in tokens that ranks
compute, over those of a mean request: whole requests end in bursts. Beside what the board says is
in use at the knee stands what ranks at full load say of themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import record
from benchmarks.quota_group import Done, Ranks, Shares, directory_of, mean_of, quota_group
from benchmarks.random_checkpoint import MEDIUM, write_random_checkpoint
from cluster.fleet.model_folder import resolve_model_folder
from cluster.serving.ingress_app import pipelines
from contracts import metrics
from contracts.config import BUNDLED, TandemConfig
from contracts.loading import load_config
from contracts.messages import Submit
from contracts.requests import Priority, Sampling
from models.spec.model import read_spec
from tests.support.local_group import LocalGroup

WINDOW_S = 62.0  # of the ranks' own figures, and a little
SHOWN_S = 16.0  # until a planner has said what was
WARM_S = 14.0  # a planner learns meanwhile, and answers end at different times
AT_ONCE = 512  # rows under way at full load
PER_RANK = 48  # requests under way at full load, of each attention rank

Ask = Callable[[], Awaitable[None]]  # one row or request, to its end
Between = tuple[int, ...]  # the least and the most, both as likely as what lies between


class Load(NamedTuple):
    """Of one pipeline. more: by kind, what to measure beside `ranks`. model: the bundled one, or a
    random one whose stages last longer than a period. prompt, answer: their tokens; answer None:
    rows to classify."""

    pipeline: str
    ranks: Ranks
    more: dict[str, Ranks]
    settings: list[str]
    model: dict[str, Any]
    prompt: Between = (40, 160)
    answer: Between | None = None

    @property
    def request_tokens(self) -> float:
        """That a mean request has computed: its last one only leaves."""
        answered = 0.0 if self.answer is None else sum(self.answer) / 2 - 1
        return sum(self.prompt) / 2 + answered


ROWS = Load("prefill", (0, 0, 1), {"prefill": (0, 0, 2)}, [], {"folder": BUNDLED})
SLOW = {  # stages of several periods
    "num_hidden_layers": 4,
    "num_experts": 16,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


def generating(options: argparse.Namespace) -> Load:
    """Answers differ in length: of one, those that begin together would end together, and batches
    be all prompts, then all decodes."""
    attention, expert = options.ranks
    return Load(
        "generation",
        (attention, expert, 0),
        {"attention": (attention + 1, expert, 0), "expert": (attention, expert + 1, 0)},
        [f"schedule.max_batch_sequences={options.sequences}", "kv.pool_tokens=32768"],
        {**MEDIUM, **SLOW},
        tuple(options.prompt),
        tuple(options.answer),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generating", action="store_true")
    parser.add_argument("--quota", type=float, default=0.25, help="of a core, each rank")
    parser.add_argument("--light", type=float, default=0.33, help="of full load")
    parser.add_argument("--seconds", type=float, default=25.0, help="of full load")
    parser.add_argument("--ranks", type=int, nargs=2, default=[1, 1], help="attention and expert")
    parser.add_argument("--prompt", type=int, nargs=2, default=[40, 160], help="tokens, at least")
    parser.add_argument("--answer", type=int, nargs=2, default=[4, 28], help="tokens, at least")
    parser.add_argument("--sequences", type=int, default=16, help="of a batch that generates")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not 0 < options.light < 1:
        parser.error(f"--light {options.light}: give a part of full load, between 0 and 1")
    load = generating(options) if options.generating else ROWS
    with tempfile.TemporaryDirectory() as scratch:
        folder = _model_folder(load, Path(scratch))
        summary = _summary(load, folder, options)
    print(json.dumps(summary, indent=1))
    name = "capacity_generating" if options.generating else "capacity_measured"
    record(name, options, {}, summary, load.model)


def _model_folder(load: Load, scratch: Path) -> Path:
    if "folder" in load.model:
        return resolve_model_folder(load.model["folder"])
    return write_random_checkpoint(scratch, load.model)


def _summary(load: Load, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    def full(ranks: Ranks) -> tuple[float, Shares]:
        with quota_group(_config(load, folder, ranks), options.quota) as (group, config):
            per_s, busy = asyncio.run(_full(group, config, load, folder, options.seconds))
        print(f"ranks {ranks}: {per_s:.2f} a second, busy {busy}", file=sys.stderr)
        return per_s, busy

    now_per_s, busy = full(load.ranks)
    light_per_s = options.light * now_per_s
    with quota_group(_config(load, folder, load.ranks), options.quota) as (group, config):
        said = asyncio.run(_said(group, config, load, folder, light_per_s))
    print(f"said at {light_per_s:.1f} a second: {said}", file=sys.stderr)
    more = {}
    for kind, ranks in load.more.items():
        (then_per_s, then_busy), gain = full(ranks), said[f"gain_{kind}"]
        more[kind] = {
            "full_per_s": then_per_s,
            "busy": then_busy,
            "gain_said": gain,
            "gain_true": then_per_s / now_per_s - 1,
            "whole_said_over_true": (1 + gain) * said["per_s"] / then_per_s,
        }
    return {
        "full_per_s": now_per_s,
        "busy": busy,
        "light_per_s": light_per_s,
        "said": said,
        "said_over_true": said["per_s"] / now_per_s,
        "headroom_said_over_true": (said["per_s"] - light_per_s) / (now_per_s - light_per_s),
        "one_more": more,
    }


def _config(load: Load, folder: Path, ranks: Ranks) -> TandemConfig:
    sizes = zip(("attention", "expert", "prefill"), ranks, strict=True)
    settings = [f"groups.{kind}_ranks={count}" for kind, count in sizes]
    common = ["model.dtype=float32", "channel.spin_s=0", f"model.path={folder}"]
    return load_config(None, [*settings, *common, *load.settings])


@asynccontextmanager
async def _asking(
    group: LocalGroup, config: TandemConfig, load: Load, folder: Path
) -> AsyncIterator[Ask]:
    """Of prompts that have no other's prefix."""
    backend = pipelines(config, directory_of(group, config))
    source = random.Random(os.getpid())
    vocabulary = read_spec(folder).vocab_size

    def submit(sampling: Sampling | None) -> Submit:
        tokens = source.randint(*load.prompt)
        return Submit(
            request_id=0,
            token_ids=[source.randrange(4, vocabulary) for _ in range(tokens)],
            sampling=sampling,
            priority=Priority.BE if sampling is None else Priority.LS,
            candidates=[5, 6] if sampling is None else None,
        )

    async def row() -> None:
        await backend.score(submit(None), wait_for_slot=True)

    async def generation() -> None:
        tokens = source.randint(*(load.answer or (1, 1)))
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        async for _ in backend.generate(submit(sampling), wait_for_slot=True):
            pass

    backend.start()
    await backend.wait_ready()
    try:
        yield row if load.answer is None else generation
    finally:
        await backend.close()


async def _said(
    group: LocalGroup, config: TandemConfig, load: Load, folder: Path, per_s: float
) -> dict[str, float]:
    """Of light load: what would go in all, and the gains, by kind."""
    seconds = WINDOW_S + (0.0 if load.answer is None else SHOWN_S)
    of = {"pipeline": load.pipeline}
    async with _asking(group, config, load, folder) as ask:
        ended = await _at_rate(ask, per_s, seconds)
        used = mean_of(group, metrics.CAPACITY_USED.name, **of)
        gains = {
            f"gain_{kind}": mean_of(group, metrics.CAPACITY_GAIN.name, **of, kind=kind)
            for kind in load.more
        }
        in_use = {} if load.answer is None else _in_use(group)
        await ended
    return {"used_fraction": used, "per_s": per_s / used, **gains, **in_use}


def _in_use(group: LocalGroup) -> dict[str, float]:
    """At the knee, as the planner says."""
    return {
        f"in_use_{resource}": mean_of(group, metrics.CAPACITY_IN_USE.name, resource=resource)
        for resource in ("attention", "experts")
    }


async def _full(
    group: LocalGroup, config: TandemConfig, load: Load, folder: Path, seconds: float
) -> tuple[float, Shares]:
    """Per second while as many as there is room for are always under way; and how busy ranks are
    meanwhile."""
    at_once = AT_ONCE if load.answer is None else PER_RANK * config.groups.attention_ranks
    async with _asking(group, config, load, folder) as ask:

        async def asking(begin_s: float) -> None:
            await asyncio.sleep(begin_s)
            while True:
                await ask()

        begins_s = [WARM_S / 2 * number / at_once for number in range(at_once)]
        clients = [asyncio.ensure_future(asking(begin_s)) for begin_s in begins_s]
        await asyncio.sleep(WARM_S)
        before = Done.of(group)
        await asyncio.sleep(seconds)
        tokens_per_s, busy = Done.of(group).since(before)
        for client in clients:
            client.cancel()
        told = await asyncio.gather(*clients, return_exceptions=True)
    if failed := [one for one in told if not isinstance(one, asyncio.CancelledError)]:
        raise SystemExit(f"{len(failed)} clients failed, the first: {failed[0]}")
    return tokens_per_s / load.request_tokens, busy


async def _at_rate(ask: Ask, per_s: float, seconds: float) -> Awaitable[Any]:
    """Open loop, Poisson. What is left to wait for."""
    source, end_s = random.Random(0), time.monotonic() + seconds
    asked = []
    due_s = time.monotonic()
    while due_s < end_s:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        asked.append(asyncio.ensure_future(ask()))
        due_s += source.expovariate(per_s)
    return asyncio.gather(*asked)


if __name__ == "__main__":
    main()
