"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

Parameters = ParamSpec("Parameters")

LIMIT_S = 60.0


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until `condition`, which may depend on sockets."""
    while not condition():
        await asyncio.sleep(0.001)


def run_async(test: Callable[Parameters, Coroutine[Any, Any, None]]) -> Callable[Parameters, None]:
    """Return a test that runs the coroutine in a new event loop, for at most LIMIT_S."""

    @functools.wraps(test)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), LIMIT_S))

    return run
