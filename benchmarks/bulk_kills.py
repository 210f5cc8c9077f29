"""The bulk job with processes killed under it: every row once, little done again, flat memory.

    python -m benchmarks.bulk_kills                            200,000 rows, bundled model
    python -m benchmarks.bulk_kills --rows 1000000 --stub      all but the model
    python -m benchmarks.bulk_kills --rows 2000 --stub         a look

A Ray cluster and `tandem serve` are started, and the job comes by `ray job submit`. At random
moments a prefill worker, the router and the driver get SIGKILL; after the driver the job is
submitted again with --resume. Rows are short sentences, made up or from the JSONL files of --data.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
from ray.job_submission import JobStatus, JobSubmissionClient

from benchmarks.harness import Result, write_result
from benchmarks.ray_head import BIN, ENVIRONMENT, ROOT, RayHead, ray_head
from cluster.bulk.driver import IN_FLIGHT_ROWS
from cluster.bulk.output import journal_name
from cluster.front import free_port

TEMPLATE = "Review: {text}\\nSentiment:"
LABELS = "negative,positive"
POLL_S = 0.5
READY_TIMEOUT_S = 180.0
VICTIMS = ("worker", "router", "driver")
_WORDS = ("film", "good", "bad", "long", "short", "great", "boring", "and", "but", "never", "like")


class Sample(NamedTuple):
    seconds: float
    rows: int
    driver_bytes: int


class Watched(NamedTuple):
    """What one submission of the job did. killed: (seconds, victim)."""

    status: str
    samples: list[Sample]
    killed: list[tuple[float, str]]


def made_up(rows: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(rows):
        yield " ".join(rng.choices(_WORDS, k=rng.randint(3, 9)))


def texts_of(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["text"]


def write_rows(path: Path, rows: int, seed: int, data: Path | None) -> None:
    """`rows` rows with the ids 0, 1, …; those of `data` again and again if they are too few."""
    texts = list(texts_of(data)) if data is not None else []
    source = (texts[n % len(texts)] for n in range(rows)) if texts else made_up(rows, seed)
    with path.open("wb") as file:
        for number, text in enumerate(source):
            file.write(msgspec.json.encode({"id": number, "text": text}) + b"\n")


def start_server(head: RayHead, options: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    """`tandem serve` on the cluster, ready; what it logs is in `folder`."""
    settings = ["--set", f"groups.address={head.address}", "--port", str(free_port())]
    settings += ["--prefill-ranks", str(options.workers), "--attention-ranks", "0"]
    settings += ["--expert-ranks", "0", "--dtype", options.dtype]
    if options.stub:
        settings += ["--set", "prefill.engine=stub"]
    server = subprocess.Popen(
        [sys.executable, "-m", "cluster", "serve", *settings],
        env=ENVIRONMENT,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=(folder / "server.log").open("wb"),
        text=True,
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line.startswith("ready"):
        said = (folder / "server.log").read_text(encoding="utf-8")
        raise RuntimeError(f"tandem serve ended with {server.wait()}: {said[-2000:]}")
    print(line.rstrip(), flush=True)
    return server


def submit(head: RayHead, name: str, source: Path, output: Path) -> None:
    """`ray job submit`, as a user types it; returns at once. Resumes whatever is there."""
    entry = [
        *("python", "-m", "cluster.bulk", "--address", "auto", "--resume"),
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
    found = [p for p in head.running("-m cluster.bulk") if "python" in Path(p.cmdline()[0]).name]
    return found[0] if found else None


def kill(head: RayHead, victim: str, rng: random.Random) -> bool:
    """SIGKILL to one of the victim's kind; whether there was one."""
    driver = driver_of(head)
    found = {
        "worker": head.running("ray::WorkerShell"),
        "router": head.running("ray::BulkRouter"),
        "driver": [driver] if driver is not None else [],
    }[victim]
    if found:
        rng.choice(found).send_signal(signal.SIGKILL)
    return bool(found)


def _came(journal: Path) -> int:
    try:
        return journal.read_bytes().count(b'["came"')
    except FileNotFoundError:  # committed meanwhile
        return 0


class RowsDone:
    """Rows answered so far, from the output folder: the ledger's and the journals' lines."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def count(self) -> int:
        journals = {path.name: _came(path) for path in self._output.glob("journal-*.jsonl")}
        ledger = self._output / "ledger.jsonl"
        done = 0
        for line in ledger.read_bytes().splitlines() if ledger.exists() else ():
            entry = json.loads(line)
            done += entry["rows_ok"] + entry["rows_rejected"]
            journals.pop(journal_name(entry["window"]), None)  # there for a moment longer
        return done + sum(journals.values())


def watch(
    head: RayHead,
    name: str,
    rows: RowsDone,
    plan: list[tuple[int, str]],
    options: argparse.Namespace,
    rng: random.Random,
) -> Watched:
    """Follows a submission to its end; kills whoever the plan names at that many rows."""
    client = JobSubmissionClient(head.dashboard)
    begun_s = said_s = time.monotonic()
    samples: list[Sample] = []
    killed: list[tuple[float, str]] = []
    while True:
        status = client.get_job_status(name)
        if status.is_terminal():
            if status is not JobStatus.SUCCEEDED and not any(v == "driver" for _, v in killed):
                raise RuntimeError(f"{name}: {status}: {client.get_job_logs(name)[-2000:]}")
            return Watched(status.value, samples, killed)
        now_s = time.monotonic() - begun_s
        if now_s > options.timeout_s:
            raise RuntimeError(f"{name}: not done in {options.timeout_s:g} s")
        done, driver = rows.count(), driver_of(head)
        if driver is not None:
            try:
                samples.append(Sample(now_s, done, driver.memory_info().rss))
            except psutil.Error:
                continue
        if plan and done >= plan[0][0] and kill(head, plan[0][1], rng):
            killed.append((now_s, plan[0][1]))
            print(f"  {now_s:6.1f} s: {done:,} rows, {plan[0][1]} killed", flush=True)
            plan.pop(0)
        if time.monotonic() - said_s > 10:
            said_s = time.monotonic()
            left = (options.rows - done) * now_s / done if done else float("nan")
            print(f"  {now_s:6.1f} s: {done:,} rows, about {left:.0f} s left", flush=True)
        time.sleep(POLL_S)


def check(output: Path, rows: int) -> dict[str, Any]:
    """The summary. Raises RuntimeError unless every row is there once."""
    seen: Counter[int] = Counter()
    for part in sorted(output.glob("part-*.jsonl")):
        with part.open("rb") as file:
            seen.update(json.loads(line)["id"] for line in file)
    missing, repeated = rows - len(seen), sum(seen.values()) - len(seen)
    if missing or repeated or set(seen) != set(range(rows)):
        raise RuntimeError(f"{missing} rows are missing, {repeated} are there twice")
    left = [path.name for path in output.glob("journal-*")]
    if left or (output / "rejected.jsonl").stat().st_size:
        raise RuntimeError(f"left over: {left}, or rejected rows")
    summary: dict[str, Any] = json.loads((output / "summary.json").read_bytes())
    return summary


def run(options: argparse.Namespace, folder: Path) -> tuple[list[Watched], dict[str, Any]]:
    """The whole story; the submissions, and what came of them."""
    rng = random.Random(options.seed)
    source, output = folder / "rows.jsonl", folder / "out"
    write_rows(source, options.rows, options.seed, options.data)
    victims = rng.sample(VICTIMS, len(VICTIMS))
    moments = sorted(rng.uniform(0.1, 0.8) * options.rows for _ in victims)
    plan = [(round(at), victim) for at, victim in zip(moments, victims, strict=True)]
    print(f"plan: {', '.join(f'{v} at {at:,} rows' for at, v in plan)}", flush=True)
    watched: list[Watched] = []
    with ray_head(dashboard=True) as head:
        server = start_server(head, options, folder)
        try:
            while not watched or watched[-1].status != "SUCCEEDED":
                name = f"bulk-{len(watched)}"
                submit(head, name, source, output)
                watched.append(watch(head, name, RowsDone(output), plan, options, rng))
                print(f"{name}: {watched[-1].status}", flush=True)
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(60.0)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    return watched, check(output, options.rows)


def report(
    watched: Sequence[Watched], summary: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """What the table shows. A worker's death sends rows again within the router: at most those in
    flight."""
    kills = [victim for one in watched for _, victim in one.killed]
    sent_again = summary["rows_sent_again"]
    at_most = sent_again + IN_FLIGHT_ROWS * kills.count("worker")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stub", action="store_true", help="workers without a model")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="float32")
    parser.add_argument("--data", type=Path, help="folder of JSONL files with a field text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--output", type=Path, help="JSON result")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bulk-kills-"))
    try:
        watched, summary = run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = report(watched, summary, options)
    for key, value in table.items():
        print(f"{key:28} {value:,.4g}" if isinstance(value, float) else f"{key:28} {value}")
    settings = msgspec.to_builtins(vars(options), enc_hook=str)
    name = "bulk_kills_stub" if options.stub else "bulk_kills"
    samples = {f"bulk-{n}": [list(s) for s in one.samples] for n, one in enumerate(watched)}
    result = Result(name=name, kind="measured", settings=settings, samples=samples, summary=table)
    print(f"written: {write_result(result, options.output)}")


if __name__ == "__main__":
    main()
