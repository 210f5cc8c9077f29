"""Faults of every kind, one after the other and two at once, under streams, classification and bulk
rows; each answer is compared with that of an undisturbed run.

    python -m benchmarks.chaos --faults 200              ranks as plain processes
    python -m benchmarks.chaos --faults 200 --served     `tandem serve`, on Ray

Exit status 1: an answer was lost or changed, or something is left. As root it runs under a /dev/shm
of its own, and can fill it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.chaos import verdict
from benchmarks.chaos.plain import PlainTarget
from benchmarks.chaos.run import Run, Target
from benchmarks.chaos.schedule import Mix, drawn
from benchmarks.chaos.served import ServedTarget
from benchmarks.harness import Result, write_result
from cluster.files.model_folder import resolve_model_folder
from contracts.config import BUNDLED, TandemConfig
from contracts.loading import config_from

_OWN_SHM = "TANDEM_CHAOS_OWN_SHM"
ROLES = ["attention-0", "attention-1", "expert-0", "expert-1", "planner-0"]
WEIGHTS = {
    "kill attention": 4.0,
    "kill expert": 4.0,
    "stop attention": 3.0,
    "stop expert": 3.0,
    "kill planner": 1.0,
    "kill ingress": 1.0,
}


def config(dtype: str) -> TandemConfig:
    """Two ranks of each group: one of each is lost at a time, or two."""
    tree = {
        "model": {"path": BUNDLED, "dtype": dtype},
        "groups": {"attention_ranks": 2, "expert_ranks": 2},
        "kv": {"pool_tokens": 16_384},
        "http": {"request_timeout_s": 120.0, "access_log": False},
        "log": {"level": "warning"},
        "metrics": {"exporters": False},
    }
    return config_from(tree, source="chaos")


def main() -> int:
    options = _options()
    target: Target
    context: ServedTarget | PlainTarget
    made = config(options.dtype)
    weights, roles = dict(WEIGHTS), list(ROLES)
    if options.served:
        weights["kill launcher"] = 1.0
        context = ServedTarget(made, options.log)
        roles += ["ingress-0", "launcher-0"]
    else:
        context = PlainTarget(resolve_model_folder(BUNDLED), made)
        roles += ["ingress-0", "ingress-1"]
    if _OWN_SHM in os.environ:
        weights["full_shm"] = 1.0
    mix = Mix({name: weight for name, weight in weights.items() if options.only in name})
    faults = drawn(options.seed, options.faults, roles, mix)
    before = segments()
    with context as target:
        run = Run(target, faults)
        asyncio.run(run.go())
    left = sorted(segments() - before) if _OWN_SHM in os.environ else []
    print(verdict.table(run))
    told = verdict.summary(run, left)
    for line in told["failures"]:
        print(line, file=sys.stderr)
    print({key: value for key, value in told.items() if key != "failures"})
    settings = {key: str(value) for key, value in vars(options).items()}
    samples = verdict.waits(run.done, run.clients.streams)
    write_result(
        Result(name="chaos", kind="measured", settings=settings, samples=samples, summary=told),
        options.output,
    )
    return 1 if told["failures"] else 0


def segments() -> set[str]:
    """Names in /dev/shm."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help='faults with this in them, as "kill expert"')
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--served", action="store_true", help="`tandem serve`, on Ray")
    parser.add_argument("--log", type=Path, default=Path("chaos.log"), help="the server's output")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/chaos.json")
    return parser.parse_args()


def in_own_shm() -> int:
    """Once more in a mount namespace with an empty /dev/shm: what is left there is ours."""
    script = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'
    command = [sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:]]
    environment = {**os.environ, _OWN_SHM: "1"}
    entered = ["unshare", "--mount", "--", "sh", "-c", script, "sh", *command]
    return subprocess.run(entered, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(in_own_shm() if os.geteuid() == 0 and _OWN_SHM not in os.environ else main())
