"""A bulk job whose driver, worker, server and node are killed: every row once, and how much was
computed again.

    python -m benchmarks bulk_kills                            200,000 rows, bundled model
    python -m benchmarks bulk_kills --rows 1000000 --stub      all but the model
    python -m benchmarks bulk_kills --rows 2000 --stub         a look
    python -m benchmarks bulk_kills --nodes 2                  a worker on each node, one is killed

A Ray cluster and `tandem serve` are started, and the job comes by `ray job submit`. At random
moments a prefill worker, the router and the driver get SIGKILL; after the driver the job is
submitted again with --resume. With two nodes, all processes of the one that is not the head get
SIGKILL too, and a new node joins. Rows are short sentences, made up or from the JSONL files of
--data.
"""

import argparse
import contextlib
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from ray.job_submission import JobStatus, JobSubmissionClient

from benchmarks.harness import Measured, Table, documented_case, table_of
from benchmarks.support.bulk_rows import RowsDone, check, write_rows
from benchmarks.support.server import ServerProcess
from cluster.tools.bulk.job import IN_FLIGHT_ROWS
from tests.support.ray_head import BIN, ENVIRONMENT, ROOT, RayHead, RayNode, ray_head, ray_node

TEMPLATE = "Review: {text}\\nSentiment:"
LABELS = "negative,positive"
POLL_S = 0.5
VICTIMS = ("worker", "router", "driver")
ROOM = {"prefill": 1.0}  # for one worker on each of two nodes
ON_EACH = ("--set", "groups.prefill_resources={prefill: 1}")


class Sample(NamedTuple):
    seconds: float
    rows: int
    driver_bytes: int


class Watched(NamedTuple):
    """What one submission of the job did. killed: (seconds, victim)."""

    status: str
    samples: list[Sample]
    killed: list[tuple[float, str]]


def serving(head: RayHead, options: argparse.Namespace, folder: Path, *more: str) -> ServerProcess:
    """Return `tandem serve` on the cluster, with options `more`; it logs into `folder`."""
    settings = ["--set", f"groups.address={head.address}", "--attention-ranks", "0"]
    settings += ["--expert-ranks", "0", "--prefill-ranks", str(options.workers)]
    settings += ["--dtype", options.dtype, *more]
    if options.stub:
        settings += ["--set", "prefill.engine=tests.support.stub_rank:stub_rank"]
    log = folder / "server.log"
    return ServerProcess(*settings, checkout=ROOT, environment=ENVIRONMENT, log=log)


def submit(head: RayHead, name: str, source: Path, output: Path) -> None:
    """`ray job submit`, as a user types it; returns at once. Resumes whatever is there."""
    entry = [
        *("python", "-m", "tandem", "bulk", "--address", "auto", "--resume"),
        *("--input", str(source), "--output", str(output), "--labels", LABELS),
        *("--template", TEMPLATE, "--id-field", "id"),
    ]
    command = [
        *(str(BIN / "ray"), "job", "submit", "--address", head.dashboard),
        *("--working-dir", str(ROOT), "--no-wait", "--submission-id", name, "--", *entry),
    ]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ray job submit: {done.stderr[-2000:]}")


def driver_of(head: RayHead) -> psutil.Process | None:
    found = [p for p in head.running("-m tandem bulk") if "python" in Path(p.cmdline()[0]).name]
    return found[0] if found else None


class OtherNodes:
    """The nodes beside the head, one at a time: another one comes in the place of a killed one."""

    def __init__(self, head: RayHead, stack: contextlib.ExitStack) -> None:
        self._head, self._stack = head, stack
        self._number = 1  # the head's
        self._node = self._start()

    def _start(self) -> RayNode:
        self._number += 1
        return self._stack.enter_context(ray_node(self._head, self._number, resources=ROOM))

    def replace(self) -> None:
        """SIGKILL to all processes of the node; then a new one."""
        self._node.kill()
        self._node = self._start()

    def running(self, *words: str) -> list[psutil.Process]:
        return self._node.running(*words)


def kill(head: RayHead, victim: str, rng: random.Random, nodes: OtherNodes | None = None) -> bool:
    """SIGKILL to one of the victim's kind; whether there was one."""
    if victim == "node":
        assert nodes is not None
        nodes.replace()
        return True
    driver = driver_of(head)

    def running(name: str) -> list[psutil.Process]:
        return head.running(name) + (nodes.running(name) if nodes is not None else [])

    found = {
        "worker": running("ray::prefill-"),
        "router": running("ray::BulkRouter"),
        "driver": [driver] if driver is not None else [],
    }[victim]
    if found:
        rng.choice(found).send_signal(signal.SIGKILL)
    return bool(found)


def watch(
    head: RayHead,
    name: str,
    rows: RowsDone,
    plan: list[tuple[int, str]],
    options: argparse.Namespace,
    strike: Callable[[str], bool],
) -> Watched:
    """Follow a submission to its end; kill the process that the plan names at each row count."""
    client = JobSubmissionClient(head.dashboard)
    started_s = printed_s = time.monotonic()
    samples: list[Sample] = []
    killed: list[tuple[float, str]] = []
    while True:
        status = client.get_job_status(name)
        if status.is_terminal():
            if status is not JobStatus.SUCCEEDED and not any(v == "driver" for _, v in killed):
                raise RuntimeError(f"{name}: {status}: {client.get_job_logs(name)[-2000:]}")
            return Watched(status.value, samples, killed)
        now_s = time.monotonic() - started_s
        if now_s > options.timeout_s:
            raise RuntimeError(f"{name}: not done in {options.timeout_s:g} s")
        done, driver = rows.count(), driver_of(head)
        if driver is not None:
            try:
                samples.append(Sample(now_s, done, driver.memory_info().rss))
            except psutil.Error:
                continue
        if plan and done >= plan[0][0] and strike(plan[0][1]):
            killed.append((now_s, plan[0][1]))
            print(f"  {now_s:6.1f} s: {done:,} rows, {plan[0][1]} killed", flush=True)
            plan.pop(0)
        if time.monotonic() - printed_s > 10:
            printed_s = time.monotonic()
            left = f", about {(options.rows - done) * now_s / done:.0f} s left" if done else ""
            print(f"  {now_s:6.1f} s: {done:,} rows{left}", flush=True)
        time.sleep(POLL_S)


def run(options: argparse.Namespace, folder: Path) -> tuple[list[Watched], dict[str, Any]]:
    """The whole story; the submissions, and what came of them."""
    rng = random.Random(options.seed)
    source, output = folder / "rows.jsonl", folder / "out"
    write_rows(source, options.rows, options.seed, options.data)
    kinds = (*VICTIMS, "node") if options.nodes == 2 else VICTIMS
    victims = rng.sample(kinds, len(kinds))
    moments = sorted(rng.uniform(0.1, 0.8) * options.rows for _ in victims)
    plan = [(round(at), victim) for at, victim in zip(moments, victims, strict=True)]
    print(f"plan: {', '.join(f'{v} at {at:,} rows' for at, v in plan)}", flush=True)
    watched: list[Watched] = []
    with contextlib.ExitStack() as stack:
        two = options.nodes == 2
        head = stack.enter_context(ray_head(dashboard=True, resources=ROOM if two else {}))
        nodes = OtherNodes(head, stack) if two else None
        strike = partial(kill, head, rng=rng, nodes=nodes)
        server = stack.enter_context(serving(head, options, folder, *(ON_EACH if two else ())))
        server.wait_healthy()
        while not watched or watched[-1].status != "SUCCEEDED":
            name = f"bulk-{len(watched)}"
            submit(head, name, source, output)
            watched.append(watch(head, name, RowsDone(output), plan, options, strike))
            print(f"{name}: {watched[-1].status}", flush=True)
    return watched, check(output, options.rows)


def report(
    watched: Sequence[Watched], summary: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """What the table shows. A worker's death sends rows again within the router: at most those in
    flight."""
    kills = [victim for one in watched for _, victim in one.killed]
    sent_again = summary["rows_sent_again"]
    lost_workers = kills.count("worker") + kills.count("node")
    at_most = sent_again + IN_FLIGHT_ROWS * lost_workers
    longest = max(watched, key=lambda one: len(one.samples)).samples
    settled = [sample.driver_bytes for sample in longest[len(longest) // 4 :]]
    half = len(settled) // 2
    return {
        "rows": options.rows,
        "kills": kills,
        "submissions": len(watched),
        "rows_sent_again": sent_again,
        "done_again_at_most_fraction": at_most / options.rows,
        "seconds": summary["seconds"],
        "rows_per_s": summary["rows_per_s"],
        "tokens_per_s": summary["tokens_per_s"],
        "cached_fraction": summary["cached_fraction"],
        "driver_peak_mib": max(s.driver_bytes for s in longest) / 2**20,
        "driver_growth_mib": (max(settled[half:]) - max(settled[:half])) / 2**20 if half else 0.0,
    }


def measure(options: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory(prefix="bulk-kills-", ignore_cleanup_errors=True) as folder:
        watched, summary = run(options, Path(folder))
    samples = {f"bulk-{n}": [list(s) for s in one.samples] for n, one in enumerate(watched)}
    return Measured(samples, report(watched, summary, options), {}, "_stub" * options.stub)


def tables(summary: dict[str, Any]) -> list[Table]:
    return [table_of({f"{summary['rows']:,} rows": summary})]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stub", action="store_true", help="workers without a model")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1, help="2: one is killed too")
    parser.add_argument("--data", type=Path, help="folder of JSONL files with a field text")


CASE = documented_case(__doc__, "Bulk job under kills", measure, tables, add_options)
