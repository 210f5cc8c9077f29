"""Two Ray nodes in two network namespaces of one machine: groups spread over both, TCP channels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.local import LocalModel
from models.tokenizer import Tokenizer

pytestmark = [pytest.mark.net, pytest.mark.ray]

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "models" / "bundled"
PROMPT = "Message: WINNER! Claim your free prize now\nSpam:"
HEAD, OTHER = "10.77.0.1", "10.77.0.2"
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
START_DEADLINE_S = 90


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=START_DEADLINE_S, env=ENVIRONMENT
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a veth pair."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"tandem{os.getpid()}{side}" for side in "ab"]
    cards = [f"tv{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", cards[0], "type", "veth", "peer", "name", cards[1])
        for name, card, address in zip(names, cards, (HEAD, OTHER), strict=True):
            run("ip", "link", "set", card, "netns", name)
            inside = ("ip", "netns", "exec", name, "ip")
            run(*inside, "addr", "add", f"{address}/24", "dev", card)
            run(*inside, "link", "set", card, "up")
            run(*inside, "link", "set", "lo", "up")
    except RuntimeError as error:
        for name in names:
            run("ip", "netns", "del", name, check=False)
        pytest.skip(f"no network namespaces here: {error}")
    yield names[0], names[1]
    for name in names:
        for pid in run("ip", "netns", "pids", name, check=False).split():
            run("kill", "-9", pid, check=False)
        run("ip", "netns", "del", name, check=False)


@pytest.fixture(scope="module")
def ray_nodes(namespaces: tuple[str, str]) -> Iterator[str]:
    """A Ray head in the first namespace, a node in the second; the head's namespace."""
    ray = str(Path(sys.executable).parent / "ray")
    folder = tempfile.mkdtemp(prefix="tr")
    common = ("--num-cpus=4", "--object-store-memory=100000000")
    head = ("--head", f"--node-ip-address={HEAD}", "--port=6379", "--include-dashboard=false")
    other = (f"--address={HEAD}:6379", f"--node-ip-address={OTHER}")
    for name, options in zip(namespaces, ((*head, f"--temp-dir={folder}"), other), strict=True):
        run("ip", "netns", "exec", name, ray, "start", *options, *common)
    yield namespaces[0]
    shutil.rmtree(folder, ignore_errors=True)


def test_spread_groups_answer_over_tcp_between_two_nodes(ray_nodes: str) -> None:
    inside = ("ip", "netns", "exec", ray_nodes)
    server = subprocess.Popen(
        [
            *(*inside, sys.executable, "-m", "cluster", "serve", "--dtype", "float32"),
            *("--attention-ranks", "2", "--expert-ranks", "2"),
            *("--set", "groups.placement=spread", "--set", f"groups.address={HEAD}:6379"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    try:
        assert server.stdout is not None
        ready = server.stdout.readline()
        assert ready.startswith("ready in"), ready
        url = ready.split()[-1]
        request = {"model": "bundled", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        answer = run(*inside, *curl(f"{url}/completions", {**request, "ignore_eos": True}))
        assert json.loads(answer)["choices"][0]["text"] == expected_text(8)
        metrics = run(*inside, "curl", "-sS", f"{url.removesuffix('/v1')}/metrics")
        assert 'tandem_channel_bytes_total{backend="tcp",direction="a2e"}' in metrics
    finally:
        server.terminate()
        assert server.wait(60) == 0


def curl(url: str, body: dict[str, object]) -> tuple[str, ...]:
    return ("curl", "-sS", url, "-H", "content-type: application/json", "-d", json.dumps(body))


def expected_text(steps: int) -> str:
    tokenizer = Tokenizer.load(BUNDLED)
    local = LocalModel.load(BUNDLED, dtype="float32")
    return tokenizer.decode(local.greedy(tokenizer.encode(PROMPT), steps))
