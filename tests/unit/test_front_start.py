"""What `tandem serve` makes of the front's options, and that it waits for its own front."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cluster import application, serving
from contracts.errors import LaunchError, ResourceError


class Groups:
    """The handle of a Groups deployment whose ingress listens, or not."""

    def __init__(self, listens: bool) -> None:
        self.is_served = False
        self.listens = self._method(lambda: listens)
        self.served = self._method(self._serve)

    def _serve(self) -> None:
        self.is_served = True

    @staticmethod
    def _method(answer: Any) -> Any:
        response = SimpleNamespace(result=lambda timeout_s: answer())
        return SimpleNamespace(remote=lambda: response)


@pytest.fixture(autouse=True)
def _another_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200))
    monkeypatch.setattr(application, "check_deployed", lambda _: None)


def test_a_200_of_another_server_on_the_port_is_not_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FINDINGS B6: of two started at once, both said that they were ready."""

    def told(_: object) -> None:
        raise ResourceError("http.host=h http.port=1: Address already in use")

    monkeypatch.setattr(application, "check_told", told)
    groups = Groups(listens=False)
    deployed = application.Deployed("tandem", "id", groups)  # type: ignore[arg-type]
    with pytest.raises(ResourceError, match="already in use"):
        serving._wait_healthy("http://127.0.0.1:1", deployed, 5.0)
    assert not groups.is_served
    monkeypatch.setattr(application, "check_told", lambda _: None)
    with pytest.raises(LaunchError, match="another server answers there"):
        serving._wait_healthy("http://127.0.0.1:1", deployed, 0.2)


def test_a_200_of_our_own_is() -> None:
    groups = Groups(listens=True)
    deployed = application.Deployed("tandem", "id", groups)  # type: ignore[arg-type]
    serving._wait_healthy("http://127.0.0.1:1", deployed, 5.0)
    assert groups.is_served
