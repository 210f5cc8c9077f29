"""Two Ray nodes in two network namespaces of one machine: groups spread over both, TCP channels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.two_nodes import ADDRESS, ENVIRONMENT, TwoNodes, run
from models.text.tokenizer import Tokenizer
from tests.support.local_model import LocalModel

pytestmark = [pytest.mark.net, pytest.mark.ray, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "models" / "bundled"
PROMPT = "Message: WINNER! Claim your free prize now\nSpam:"


def test_spread_groups_answer_over_tcp_between_two_nodes(two_nodes: TwoNodes) -> None:
    inside = two_nodes.inside(0)
    server = subprocess.Popen(
        [
            *(*inside, sys.executable, "-m", "cluster", "serve", "--dtype", "float32"),
            *("--set", "groups.placement=spread", "--set", f"groups.address={ADDRESS}"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("logs in")
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
