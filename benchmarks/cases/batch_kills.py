"""A batch whose service, worker and ingress are killed: every request answered once.

    python -m benchmarks batch_kills                           100,000 requests, bundled model
    python -m benchmarks batch_kills --rows 1000000 --stub     all but the model

The batch service, a prefill worker and the ingress get SIGKILL in turn. A killed service repeats
the requests that were under way, a killed worker those that it computed.
"""

import argparse
import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from benchmarks.cases.bulk_kills import add_server_options, serving, tables
from benchmarks.harness import Measured, documented_case
from benchmarks.support.bulk_rows import made_up
from cluster.batch.run import rows_in_flight
from cluster.http.server import free_port
from contracts.config import BatchConfig
from tests.support.ray_head import RayHead, ray_head

ENDPOINT: Any = "/v1/classify"
VICTIMS = ("ray::BatchActor", "ray::prefill-", "ray::ServeReplica:tandem:Ingress")
ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.5


def write_requests(path: Path, rows: int, seed: int) -> None:
    shared = {"model": "bundled", "labels": ["negative", "positive"]}
    shared["template"] = "Review: {text}\nSentiment:"
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(made_up(rows, seed)):
            body = {**shared, "input": text}
            line = {"custom_id": f"{number}", "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(line) + "\n")


def strike(head: RayHead, victim: str) -> bool:
    """SIGKILL to a process; whether there was one."""
    found = head.running(victim)
    if found:
        found[0].send_signal(signal.SIGKILL)
    return bool(found)


def follow(
    client: openai.OpenAI, head: RayHead, batch: str, options: argparse.Namespace
) -> tuple[list[tuple[float, str]], float]:
    """Kill processes at equal distances of answered requests; the kills, and the seconds."""
    started_s = printed_s = time.monotonic()
    killed: list[tuple[float, str]] = []
    while True:
        time.sleep(POLL_S)
        now_s = time.monotonic() - started_s
        if now_s > options.timeout_s:
            raise RuntimeError(f"not done in {options.timeout_s:g} s")
        with contextlib.suppress(openai.OpenAIError):  # of a killed ingress or service
            found = client.batches.retrieve(batch)
            done = found.request_counts.completed if found.request_counts else 0
            if found.status in ENDED:
                return killed, now_s
            victim = VICTIMS[len(killed) % len(VICTIMS)]
            is_due = done * options.kills >= (len(killed) + 0.5) * options.rows
            if len(killed) < options.kills and is_due and strike(head, victim):
                killed.append((now_s, victim))
                print(f"  {now_s:6.1f} s: {done:,} answers, {victim} killed", flush=True)
            if time.monotonic() - printed_s > 30:
                printed_s = time.monotonic()
                print(f"  {now_s:6.1f} s: {done:,} answers", flush=True)


def check(lines: Iterator[str], rows: int) -> None:
    """Raise RuntimeError unless every request has one answer."""
    seen = [int(json.loads(line)["custom_id"]) for line in lines]
    if sorted(seen) != list(range(rows)):
        raise RuntimeError(f"{len(seen)} lines of {len(set(seen))} requests, not {rows}")


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_requests(folder / "rows.jsonl", options.rows, options.seed)
    port = free_port()
    limit = ("--set", f"batch.in_flight_rows={options.in_flight}")
    storage = ("--set", f"batch.storage={folder}/batches", *limit, "--port", str(port))
    with ray_head(dashboard=True) as head, serving(head, options, folder, *storage):
        url = f"http://127.0.0.1:{port}/v1"
        client = openai.OpenAI(base_url=url, api_key="any", max_retries=20)
        with (folder / "rows.jsonl").open("rb") as file:
            uploaded = client.files.create(file=file, purpose="batch")
        batch = client.batches.create(
            input_file_id=uploaded.id, endpoint=ENDPOINT, completion_window="24h"
        )
        killed, seconds = follow(client, head, batch.id, options)
        found = client.batches.retrieve(batch.id)
        if found.status != "completed" or found.output_file_id is None:
            raise RuntimeError(f"{found.status}: {found.errors}")
        check(client.files.content(found.output_file_id).iter_lines(), options.rows)
    repeating = sum("Ingress" not in victim for _, victim in killed)
    again = repeating * min(options.in_flight, rows_in_flight(options.rows))
    return {
        "rows": options.rows,
        "kills": [victim for _, victim in killed],
        "done_again_at_most_fraction": again / options.rows,
        "seconds": seconds,
        "rows_per_s": options.rows / seconds,
    }


def measure(options: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory(prefix="batch-kills-", ignore_cleanup_errors=True) as folder:
        return Measured({}, run(options, Path(folder)), {}, "_stub" * options.stub)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser, rows=100_000, workers=1)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--in-flight", type=int, default=BatchConfig().in_flight_rows)


CASE = documented_case(__doc__, "Batch under kills", measure, tables, add_options)
