"""The test of each documented command; a command without an entry fails a test.

Patterns as in fnmatch; the first match counts.
"""

from fnmatch import fnmatchcase

from tests.support.documented import Command

HERE = "tests/architecture/test_documented_commands.py"
SERVED = "tests/ray/test_documented_commands.py"
EXISTING = "tests/ray/test_existing_cluster.py"
DEPLOYED = "tests/ray/test_deployed.py"
SERVING = "tests/ray/test_serving.py"
TOOLS = "tests/unit/cluster/tools"

TESTED: dict[str, str] = {
    "tandem serve --model DIR --attention-ranks 2 *": SERVED,
    "tandem serve --attention-ranks 0 *": EXISTING,
    "curl http://127.0.0.1:8000/*": SERVED,
    "tandem bulk --model bundled --input reviews.jsonl *": SERVED,
    "tandem serve --config tandem.yaml*": HERE,
    "tandem serve --model DIR*": SERVED,
    "tandem serve --prefill-ranks 2": SERVING,
    "tandem stop --name NAME": EXISTING,
    "tandem bulk --address … *": EXISTING,
    "tandem doctor --url *": f"{TOOLS}/doctor/test_server_checks.py",
    "tandem doctor --model DIR": HERE,
    "tandem doctor --config tandem.yaml": HERE,
    "cat *.json": HERE,
    "tandem scale --attention-ranks 3": "tests/ray/test_scale.py",
    "tandem scale --url *": "tests/unit/cluster/observe/test_operator_commands.py",
    "tandem trace --seconds *": SERVING,
    "tandem bench --*": f"{TOOLS}/bench/test_bench.py",
    "tandem plan spec.json*": HERE,
    "tandem plan *s.json": HERE,
    "tandem plan --beyond": HERE,
    "tandem plan --help": HERE,
    "tandem config*": HERE,
    "tandem profile --output here.json*": f"{TOOLS}/profile/test_hardware_profile.py",
    "tandem profile --routing *": f"{TOOLS}/profile/test_routing_profile.py",
    "tandem place routing.safetensors *": f"{TOOLS}/test_place.py",
    "tandem demo --trace FILE": SERVED,
    "make demo": SERVED,
    "python -m tandem bulk": "tests/ray/test_bulk.py",
    "RAY_ADDRESS=HEAD:6379 tandem serve *": EXISTING,
    "serve run deploy/serve.yaml*": DEPLOYED,
    "ray job submit --address*": DEPLOYED,
    "ray job submit -- *": DEPLOYED,
    "ray start --head *": EXISTING,
    "export RAY_*": EXISTING,
}
# Other tools, settings of the machine, and commands that need a network, a cluster or long runs.
UNTESTED = (
    *("make *", "serve *", "ray *", "lm_eval run *", "python -m benchmarks*", "pip install *"),
    *("sysctl *", "ip *", "ethtool *", "systemd-run *", "kubectl *", "helm *", "docker *"),
    *("promtool *", "prometheus *"),
)
BLOCKS = {"python": SERVED, "yaml": HERE}


def file_running(command: Command) -> str | None:
    """Return the file that runs the command, "" if it is not run, or None if it is not listed."""
    if command.language:
        return BLOCKS.get(command.language)
    if is_name(command.text):
        return HERE
    for pattern, test in TESTED.items():
        if fnmatchcase(command.text, pattern):
            return test
    return "" if any(fnmatchcase(command.text, pattern) for pattern in UNTESTED) else None


def is_name(text: str) -> bool:
    """Return whether it only names a command: `tandem serve`."""
    words = text.split(" ")
    return words[0] == "tandem" and len(words) == 2 and words[1].isalpha()
