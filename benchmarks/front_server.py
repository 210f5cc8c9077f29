"""A server for `front_cost`: the API before a backend that answers at once. Run as a file, with
PYTHONPATH naming the checkout whose code it is to run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import uvicorn
import uvloop

from cluster.http.app import build_app
from cluster.http.server import HttpServer
from cluster.serving.ingress_app import served_model
from contracts.config import HttpConfig, TandemConfig
from contracts.messages import Finished, Scored, Submit, Tokens
from contracts.requests import Usage

TOKEN = 60


class Backend:
    """Token by token, as fast as it is asked."""

    async def generate(
        self, submit: Submit, *, wait_for_slot: bool = False
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        assert submit.sampling is not None
        count = submit.sampling.max_tokens
        for _ in range(count):
            yield [Tokens(submit.request_id, [TOKEN], None, 0)]
            await asyncio.sleep(0)
        usage = Usage(prompt_tokens=len(submit.token_ids), completion_tokens=count)
        yield [Finished(submit.request_id, "length", usage)]

    async def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Scored:
        raise NotImplementedError

    def pool_tokens(self, *, prefill: bool) -> int | None:
        return None

    def problems(self) -> list[str]:
        return []

    def waiting(self) -> Mapping[tuple[str, str], int]:
        return {}


async def serve(port: int, kind: str) -> None:
    http = HttpConfig(port=port)
    model, tokenizer = served_model(TandemConfig())
    app = build_app(Backend(), tokenizer, model, http)
    if kind == "front":
        await HttpServer(app, http).start()
        await asyncio.Event().wait()
    settings: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False}
    server = uvicorn.Server(uvicorn.Config(app, port=port, timeout_keep_alive=75, **settings))
    with contextlib.suppress(asyncio.CancelledError):
        await server.serve()


def main() -> None:
    # Lines go where they would go, but to no disk: as much work, less chance.
    logging.basicConfig(filename="/dev/null", level=logging.WARNING)
    logging.getLogger("tandem").setLevel(logging.INFO)
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))


if __name__ == "__main__":
    main()
