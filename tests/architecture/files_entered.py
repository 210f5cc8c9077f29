"""The product's files that one request enters, from its bytes to its answer: what a reader has to
open who follows it. Ranks are threads of this process, so theirs count as well.

    python -m tests.architecture.files_entered
"""

import asyncio
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from cluster.fleet.replies import Directory
from cluster.http.app import build_app
from cluster.http.schemas import ModelInfo
from cluster.serving.ingress_app import pipelines
from contracts.config import TandemConfig
from models.text.tokenizer import Tokenizer
from tests.support.group_harness import PrefillThreads, ThreadGroup, prefill_config
from tests.support.tiny_models import make_tiny_checkpoint
from tests.support.tiny_tokenizer import write_byte_level

ROOT = Path(__file__).parents[2]
PACKAGES = ("contracts", "models", "kernels", "planner", "actors", "cluster", "deploy")
CHAT = {"messages": [{"role": "user", "content": "how are you?"}], "max_tokens": 4}
CLASSIFY = {"input": "how are you?", "labels": ["a", "b"], "template": "{text}\n"}
REPEATS = 10
REQUESTS = (("/v1/chat/completions", CHAT), ("/v1/classify", CLASSIFY))


class Entered:
    """A profile function for every thread that starts after it is installed."""

    def __init__(self) -> None:
        self.recording = False
        self._files: set[str] = set()

    def install(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.recording and event == "call" and frame.f_code.co_name != "<module>":
            self._files.add(frame.f_code.co_filename)

    @contextmanager
    def during(self) -> Iterator[list[str]]:
        """The list holds files of PACKAGES, relative to the root, once the block has ended."""
        self._files.clear()
        found: list[str] = []
        self.recording = True
        yield found
        self.recording = False
        inside = (Path(name) for name in self._files if name.startswith(str(ROOT)))
        relative = (path.relative_to(ROOT) for path in inside)
        found += sorted(str(path) for path in relative if path.parts[0] in PACKAGES)


async def entered_by_each() -> dict[str, list[str]]:
    """path → files that all of several requests enter, after a first one: what is done once only,
    or now and then (heartbeats, states), is not a request's."""
    entered = Entered()
    entered.install()
    with tempfile.TemporaryDirectory() as place:
        folder, texts = make_tiny_checkpoint(Path(place) / "model", vocab_size=420), Path(place)
        write_byte_level(texts)
        config = prefill_config(
            model={"path": str(folder), "dtype": "float32"}, groups={"prefill_ranks": 1}
        )
        with (
            PrefillThreads(folder, config) as prefill,
            ThreadGroup(folder, config, token=prefill.token) as group,
        ):
            attention, worker = group.attention[0].ready, prefill.workers[0].ready
            directory = Directory(
                client_addresses={attention.name: attention.client_address},
                prefill_addresses={worker.name: worker.client_address},
                token=prefill.token,
                ranks=[],
            )
            backend = pipelines(config, directory)
            backend.start()
            await backend.wait_ready()
            model = ModelInfo(name="m", max_context_tokens=256, vocab_size=420, eos_token_ids=())
            app = build_app(backend, Tokenizer.load(texts), model, TandemConfig())
            found = {path: await _send_request(entered, app, path, body) for path, body in REQUESTS}
            await backend.close()
            return found


async def _send_request(entered: Entered, app: Any, path: str, body: dict[str, Any]) -> list[str]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        each: list[set[str]] = []
        for _ in range(1 + REPEATS):
            with entered.during() as files:
                answer = await http.post(path, json={"model": "m", **body})
            assert answer.status_code == 200, answer.text
            each.append(set(files))
    return sorted(set.intersection(*each[1:]))


def main() -> None:
    for path, files in asyncio.run(entered_by_each()).items():
        report = "".join(f"    {name}\n" for name in files)
        sys.stdout.write(f"{path}: {len(files)} files\n{report}")


if __name__ == "__main__":
    main()
