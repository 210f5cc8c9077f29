"""Faults of every kind, one after the other and two at once, under streams, classification and bulk
rows; each answer is compared with that of an undisturbed run.

    python -m benchmarks.robustness                           ranks as plain processes
    python -m benchmarks.robustness --two-nodes            half of them behind a link, which is cut
    python -m benchmarks.robustness --served --two-nodes   `tandem serve`, on two Ray nodes
    python -m benchmarks.robustness --served --faults 0 --undisturbed 3600 --hostile   a soak

Exit status 1: an answer was lost or changed, or something is left. As root it runs under a /dev/shm
of its own, and can fill it.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil

from benchmarks.robustness import verdict
from benchmarks.robustness.fuzz.requests import RequestGenerator
from benchmarks.robustness.hostile import HostileTraffic
from benchmarks.robustness.links import Links
from benchmarks.robustness.plain import PlainTarget
from benchmarks.robustness.processes import abstract_sockets, listening_ports
from benchmarks.robustness.questions import full_load, light_load
from benchmarks.robustness.ray_nodes import RAYLET, RayNodes
from benchmarks.robustness.report import Report
from benchmarks.robustness.run import Run
from benchmarks.robustness.schedule import Fault, Mix, drawn, read
from benchmarks.robustness.served import ServedTarget
from benchmarks.support.two_nodes import TwoNodes, two_namespaces
from cluster.fleet.model_folder import resolve_model_folder
from contracts.config import BUNDLED, TandemConfig
from contracts.errors import ConfigError, TandemError
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
    "wake attention": 1.0,
}


LINK_WEIGHTS = {"cut_link": 4.0, "cut_link_one_way": 4.0, "slow_link": 4.0}


def config(dtype: str, request_timeout_s: float = 120.0) -> TandemConfig:
    """Two ranks of each group: one of each is lost at a time, or two."""
    tree = {
        "model": {"path": BUNDLED, "dtype": dtype},
        "groups": {"attention_ranks": 2, "expert_ranks": 2},
        "kv": {"pool_tokens": 16_384},
        "http": {"request_timeout_s": request_timeout_s, "access_log": False},
        "log": {"level": "warning"},
        "metrics": {"exporters": False},
    }
    return config_from(tree, source="chaos")


def main() -> int:
    options = _options()
    if options.two_nodes and options.inside is None and not options.served:
        try:
            return _in_first_of_two_nodes()
        except RuntimeError as error:
            print(f"on one node, without {', '.join(LINK_WEIGHTS)}: {error}", file=sys.stderr)
    console = os.fdopen(os.dup(2), "w")
    with options.log.open("ab") as log:
        os.dup2(log.fileno(), 2)  # what ranks say does not belong between progress and report
    try:
        report, run, left = _ran(options, console)
    except TandemError as error:
        print(error.message, file=console)
        return 2
    print(verdict.table(run))
    summary = report.write(run, left)
    for line in summary["failures"]:
        print(line, file=console)
    print({key: value for key, value in summary.items() if key != "failures"})
    return 1 if summary["failures"] else 0


def _ran(options: argparse.Namespace, console: TextIO) -> tuple[Report, Run, tuple[str, ...]]:
    """Also what is left in /dev/shm afterwards."""
    own_shm, is_exact = _OWN_SHM in os.environ, options.dtype == "float32"
    faults = _faults(options, own_shm=own_shm)
    settings = {key: str(value) for key, value in vars(options).items()}
    report = Report(settings, options.output, console)
    load = light_load() if options.light else full_load()
    before = segments()
    with _target(options) as target:
        run = Run(
            target,
            faults,
            load,
            own_shm=own_shm,
            exact=is_exact,
            hostile=_hostile(target) if options.hostile else None,
            on_done=report.after_fault,
        )
        asyncio.run(run.go(undisturbed_s=options.undisturbed))
    return report, run, tuple(sorted(segments() - before)) if own_shm else ()


def _target(options: argparse.Namespace) -> ServedTarget | PlainTarget:
    made = config(options.dtype, options.request_timeout)
    if options.served:
        return ServedTarget(made, options.log, RayNodes() if options.two_nodes else None)
    links = None
    if options.inside is not None:
        first, second, *cards = options.inside
        links = Links(TwoNodes((first, second), (cards[0], cards[1])))
    return PlainTarget(resolve_model_folder(BUNDLED), made, links=links)


def _hostile(target: ServedTarget | PlainTarget) -> HostileTraffic:
    url = urlsplit(target.urls[0])
    document = httpx.get(f"{target.urls[0]}/openapi.json").raise_for_status().content
    generator = RequestGenerator(1, msgspec.json.decode(document), BUNDLED, None)
    found = {role: psutil.Process(pid) for role, pid in target.processes().items()}
    assert url.hostname is not None
    assert url.port is not None
    ports = listening_ports(found, url.port)
    return HostileTraffic((url.hostname, url.port), generator, ports, abstract_sockets(found))


def _faults(options: argparse.Namespace, *, own_shm: bool) -> list[Fault]:
    """What this machine cannot do is left out."""
    if options.schedule:
        return read(options.schedule)
    weights, roles = dict(WEIGHTS), list(ROLES)
    if options.served:
        weights |= {"kill launcher": 1.0} | ({"kill raylet": 1.0} if options.two_nodes else {})
        del weights["wake attention"]
    if own_shm:
        weights["full_shm"] = 1.0
    if options.inside is not None:
        weights |= LINK_WEIGHTS
    roles += ["ingress-0", "launcher-0", RAYLET] if options.served else ["ingress-0", "ingress-1"]
    some = {name: weight for name, weight in weights.items() if options.only in name}
    if not some:
        raise ConfigError(f"--only {options.only}: no fault of {', '.join(weights)} has that")
    return drawn(options.seed, options.faults, roles, Mix(some)) if options.faults else []


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
    parser.add_argument("--schedule", default="", help='as "kill expert-0,stop expert-1 2.5"')
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--served", action="store_true", help="`tandem serve`, on Ray")
    parser.add_argument("--two-nodes", action="store_true", help="half of the ranks elsewhere")
    parser.add_argument("--hostile", action="store_true", help="bad, huge and slow clients beside")
    parser.add_argument("--light", action="store_true", help="few questions and short streams")
    parser.add_argument("--undisturbed", type=float, default=0.0, help="s under load before faults")
    parser.add_argument("--request-timeout", type=float, default=120.0, help="s")
    parser.add_argument("--log", type=Path, default=Path("chaos.log"), help="the server's output")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/chaos.json")
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_first_of_two_nodes() -> int:
    """Once more, in one of two network namespaces."""
    with two_namespaces() as both:
        command = [sys.executable, "-m", "benchmarks.robustness", *sys.argv[1:]]
        inside = ["--inside", *both.names, *both.cards]
        return subprocess.run([*both.inside(0), *command, *inside], check=False).returncode


def in_own_shm() -> int:
    """Once more in a mount namespace with an empty /dev/shm: what is left there is ours."""
    script = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'
    command = [sys.executable, "-m", "benchmarks.robustness", *sys.argv[1:]]
    environment = {**os.environ, _OWN_SHM: "1"}
    entered = ["unshare", "--mount", "--", "sh", "-c", script, "sh", *command]
    return subprocess.run(entered, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(in_own_shm() if os.geteuid() == 0 and _OWN_SHM not in os.environ else main())
