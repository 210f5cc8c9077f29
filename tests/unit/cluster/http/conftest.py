"""The API in front of a fake rank, for modules whose tests share it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.api_harness import Api, serve_api


@pytest.fixture(scope="session", autouse=True)
def _disconnects_are_noticed_soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.http.connections.HALF_CLOSED_S", 0.05)
        yield


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    with serve_api(folder) as api:
        yield api
