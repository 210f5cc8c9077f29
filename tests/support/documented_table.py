"""How each documented command is tested; a command without an entry fails a test.

Patterns as in fnmatch; the first match counts.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from tests.support.documented import Command

HERE = "tests/architecture/test_documented_commands.py"
SERVED = "tests/ray/test_documented_commands.py"


class Tried(NamedTuple):
    """test: the file that really runs it, from an empty folder unless `how` says otherwise."""

    test: str
    how: str = "as it is"


class Left(NamedTuple):
    reason: str


DIR = "DIR is the bundled model's folder"
MENTION = "another tool's command by its name"

TABLE: list[tuple[str, Tried | Left]] = [
    ("tandem serve --model DIR --attention-ranks 2 *", Tried(SERVED, f"{DIR}; a free port")),
    ("tandem serve --attention-ranks 0 *", Tried(SERVED, "a free port")),
    ("curl http://127.0.0.1:8000/*", Tried(SERVED, "the server's port")),
    ("tandem bulk --model bundled --input reviews.jsonl *", Tried(SERVED, "a file of three rows")),
    ("tandem serve --config tandem.yaml*", Tried(HERE, "`tandem doctor` reads the same file")),
    ("tandem serve --model DIR*", Tried(SERVED, f"with ranks; {DIR}")),
    ("tandem serve --prefill-ranks 2", Tried("tests/ray/test_prefill_serving.py", "by its keys")),
    ("tandem stop --name NAME", Tried("tests/ray/test_existing_cluster.py")),
    ("tandem bulk --address … *", Tried("tests/ray/test_existing_cluster.py")),
    (
        "tandem doctor --url *",
        Tried("tests/unit/cluster/tools/doctor/test_server_checks.py", "of a server without ranks"),
    ),
    ("tandem doctor --model DIR", Tried(HERE, DIR)),
    ("tandem doctor --config tandem.yaml", Tried(HERE)),
    ("cat *.json", Tried(HERE, "writes what the document shows")),
    ("tandem scale --attention-ranks 3", Tried("tests/ray/test_scale.py", "slow; another port")),
    (
        "tandem scale --url *",
        Tried("tests/unit/cluster/observe/test_operator_commands.py", "of a server without ranks"),
    ),
    ("tandem trace --seconds *", Tried("tests/ray/test_serving.py", "for half a second")),
    (
        "tandem bench --rate 4 *",
        Tried("tests/unit/cluster/tools/bench/test_bench.py", "of other servers"),
    ),
    ("tandem plan spec.json*", Tried(HERE)),
    ("tandem plan *s.json", Tried(HERE, "the same, every line that is shown")),
    ("tandem plan --beyond", Tried(HERE, "of the same file")),
    ("tandem plan --help", Tried(HERE)),
    ("tandem config*", Tried(HERE)),
    (
        "tandem profile --output here.json*",
        Tried("tests/unit/cluster/tools/profile/test_hardware_profile.py", "for 5 s"),
    ),
    (
        "tandem profile --routing *",
        Tried(
            "tests/unit/cluster/tools/profile/test_routing_profile.py",
            "of the bundled model, few tokens",
        ),
    ),
    ("tandem place routing.safetensors *", Tried("tests/unit/cluster/tools/test_place.py")),
    ("tandem demo --trace FILE", Tried(SERVED, "slow")),
    ("make demo", Tried(SERVED, "slow, and as `tandem demo`: make installs")),
    ("python -m cluster.bulk", Tried("tests/ray/test_bulk.py", "as a job")),
    ("make test", Left("runs this")),
    ("make check", Left("runs a part of this")),
    (
        "make chaos",
        Left(
            "200 faults take twenty minutes or more: tests/faults/test_chaos.py has twenty (slow)"
        ),
    ),
    ("make lint", Left("ruff, mypy and import rules of the clone, run beside the tests")),
    ("RAY_ADDRESS=HEAD:6379 tandem serve *", Tried("tests/ray/test_existing_cluster.py")),
    ("serve run deploy/serve.yaml*", Tried("tests/ray/test_deployed.py", "slow; a free port")),
    ("ray job submit --working-dir . -- python -m cluster.bulk *", Left("needs s3://bucket")),
    ("ray job submit*", Tried("tests/ray/test_deployed.py", "slow; the entrypoint of the RayJob")),
    (
        "ray start --head *",
        Tried("tests/ray/test_existing_cluster.py", "by tests.support.ray_head"),
    ),
    ("export RAY_*", Tried("tests/ray/test_existing_cluster.py", "by tests.support.ray_head")),
    ("serve *", Left(MENTION)),
    ("ray *", Left(MENTION)),
    ("lm_eval run *", Left("needs lm-eval and a task's data")),
    ("python -m benchmarks lm_eval_check *", Left("needs lm-eval and a task's data")),
    ("pip install *", Left("needs a network")),
    ("python -m benchmarks*", Left("a measurement of minutes: its options are tried")),
    ("make docs", Left("a part of make lint")),
    ("sysctl *", Left("a setting of the machine")),
    ("ip *", Left("a setting of the machine")),
    ("ethtool *", Left("a setting of the machine")),
    ("systemd-run *", Left("a setting of the machine")),
    ("kubectl *", Left("needs Kubernetes")),
    ("helm *", Left("needs Kubernetes")),
    ("docker *", Left("needs Docker")),
    ("promtool *", Left("needs Prometheus")),
    ("prometheus *", Left("needs Prometheus")),
]
BLOCKS = {
    "python": Tried(SERVED, "the server's port"),
    "yaml": Tried(HERE, "as tandem.yaml"),
}


def how_tried(command: Command) -> Tried | Left | None:
    """None: in no list."""
    if command.language:
        return BLOCKS.get(command.language)
    if is_name(command.text):
        return Tried(HERE, "is a command by that name")
    for pattern, how in TABLE:
        if fnmatchcase(command.text, pattern):
            return how
    return None


def is_name(text: str) -> bool:
    """Whether it only names one of our commands: `tandem serve`."""
    words = text.split(" ")
    return words[0] == "tandem" and len(words) == 2 and words[1].isalpha()
