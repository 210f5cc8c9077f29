"""What the worst bodies under 1 MB cost the ingress: its memory, and pauses of its event loop.

    python -m benchmarks.worst_requests [--json]

Each body goes to an application in a process of its own, with the bundled model's tokenizer and
default limits, before ranks that answer at once: what is measured is the ingress. Memory is the
process's largest resident size less that before the request; the pause is how late a task came at
worst that only sleeps. Decoding the body is part of both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import MutableMapping
from typing import Any

import msgspec

from benchmarks.fuzz.stub_backend import StubBackend
from cluster.http.app import build_app
from cluster.serving.ingress_app import served_model
from contracts.clock import monotonic_s
from contracts.config import HttpConfig, TandemConfig
from contracts.interpreter import freeze_heap
from contracts.messages import Scored, Submit

TICK_S = 0.001
CHAT = [{"role": "user", "content": "a"}]
WORDS = "the cat sat "

# Refused ones were answered, or ended the server, before there were limits.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "long prompt, refused": ("/v1/completions", {"prompt": WORDS * 80_000}),
    "many prompts": ("/v1/completions", {"prompt": [WORDS * 18] * 4096}),
    "32 prompts x n = 128": ("/v1/completions", {"prompt": ["a"] * 32, "n": 128}),
    "echo with logprobs": (
        "/v1/completions",
        {"prompt": [[70] * 2000] * 30, "echo": True, "logprobs": 20, "max_tokens": 0},
    ),
    "echo x n, refused": (
        "/v1/completions",
        {"prompt": [[70] * 2000] * 2, "n": 128, "echo": True, "logprobs": 20, "max_tokens": 0},
    ),
    "echo, streamed": (
        "/v1/completions",
        {"prompt": [[70] * 2000] * 30, "echo": True, "logprobs": 20, "stream": True},
    ),
    "long conversation": ("/v1/chat/completions", {"messages": CHAT * 500}),
    "far too long one": ("/v1/chat/completions", {"messages": CHAT * 20_000}),
    "large values for the template": (
        "/v1/chat/completions",
        {"messages": CHAT, "chat_template_kwargs": {"x": [[]] * 300_000}},
    ),
    "template x text, refused": (
        "/v1/classify",
        {"input": "a" * 100_000, "labels": ["a", "b"], "template": "{text}" * 3000},
    ),
    "rows x labels": (
        "/v1/classify",
        {"input": [WORDS * 10] * 4096, "labels": [f"label {n}" for n in range(15)]},
    ),
    "rows x many labels, refused": (
        "/v1/classify",
        {"input": [WORDS * 10] * 4096, "labels": [f"label {n}" for n in range(256)]},
    ),
    "96 labels of 1,900 tokens": (
        "/v1/classify",
        {"input": "a", "labels": [f"{n} " + "zq" * 900 for n in range(96)]},
    ),
    "rows of one word of 20 kB": (
        "/v1/classify",
        {"input": ["z" * 1900] * 50, "labels": [f"l{n}" for n in range(256)]},
    ),
    "query x items": (
        "/v1/score",
        {"query": WORDS * 50, "items": ["the dog " * 20] * 4096, "label_token_ids": [5]},
    ),
    "query x items, refused": (
        "/v1/score",
        {"query": WORDS * 8000, "items": ["the dog " * 20] * 4096, "label_token_ids": [5]},
    ),
    "items x labels": (
        "/v1/score",
        {"query": "a", "items": ["b"] * 2700, "label_token_ids": list(range(1024))},
    ),
    "long text": ("/tokenize", {"prompt": WORDS * 8000, "return_token_strs": True}),
    "a context of tokens": ("/detokenize", {"tokens": [70] * 2048}),
}


class QuickRanks(StubBackend):
    """Large answers are made in a thread: they are not the ingress's work."""

    async def score(self, submit: Submit, **_: Any) -> Scored:
        await asyncio.sleep(0)
        if not submit.score_top:
            return await super().score(submit)
        return await asyncio.to_thread(asyncio.run, super().score(submit))


class Cost(msgspec.Struct, frozen=True):
    case: str
    path: str
    body_kb: float
    status: int
    answer_kb: float
    peak_mb: float
    pause_ms: float
    seconds: float


class _Exchange:
    """One request, and its answer, of which only the size is kept."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0
        self.sent_bytes = 0

    async def receive(self) -> MutableMapping[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.sent_bytes += len(message.get("body", b""))


async def measured(case: str) -> Cost:
    model, tokenizer = served_model(TandemConfig())
    app = build_app(QuickRanks(), tokenizer, model, HttpConfig(access_log=False))
    await _ask(app, "/v1/classify", {"input": "a", "labels": ["b", "c"]}, model.name)
    freeze_heap()  # as an ingress does when it has started
    path, fields = BODIES[case]
    worst_s = 0.0

    async def watch() -> None:
        nonlocal worst_s
        while True:
            before_s = monotonic_s()
            await asyncio.sleep(TICK_S)
            worst_s = max(worst_s, monotonic_s() - before_s - TICK_S)

    size = len(_encoded(fields, model.name))
    before_kb, started_s = _peak_kb(), monotonic_s()
    watching = asyncio.create_task(watch())
    await asyncio.sleep(10 * TICK_S)
    exchange = await _ask(app, path, fields, model.name)
    await asyncio.sleep(2 * TICK_S)
    watching.cancel()
    return Cost(
        *(case, path, size / 1e3, exchange.status, exchange.sent_bytes / 1e3),
        *((_peak_kb() - before_kb) / 1e3, worst_s * 1e3, monotonic_s() - started_s),
    )


async def _ask(app: Any, path: str, fields: dict[str, Any], model: str) -> _Exchange:
    exchange = _Exchange(_encoded(fields, model))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    await app(scope, exchange.receive, exchange.send)
    return exchange


def _encoded(fields: dict[str, Any], model: str) -> bytes:
    return msgspec.json.encode({"model": model, **fields})


def _peak_kb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", action="store_true", help="one JSON object a line")
    options.add_argument("--case", choices=BODIES, help="in this process")
    given = options.parse_args()
    if given.case:
        print(json.dumps(msgspec.to_builtins(asyncio.run(measured(given.case)))))
        return
    if not given.json:
        print("| body | endpoint | body kB | status | answer kB | peak MB | pause ms | s |")
        print("|---|---|---|---|---|---|---|---|")
    for case in BODIES:
        command = [sys.executable, "-m", "benchmarks.worst_requests", "--case", case]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        cost = msgspec.json.decode(done.stdout, type=Cost)
        if given.json:
            print(done.stdout, end="", flush=True)
            continue
        print(
            f"| {case} | {cost.path} | {cost.body_kb:.0f} | {cost.status} | {cost.answer_kb:.0f} |"
            f" {cost.peak_mb:.0f} | {cost.pause_ms:.0f} | {cost.seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
