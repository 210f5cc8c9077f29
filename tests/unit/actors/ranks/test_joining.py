"""Whom an attention rank dials when it is told where expert ranks are."""

from __future__ import annotations

from typing import cast

import pytest

from actors.channels.base import Endpoint
from actors.ranks import attention_rank
from actors.ranks.attention_rank import NEW_S, Joining
from contracts.errors import HandshakeError


class Links:
    """An `Endpoint`, as far as it is asked: whoever is dialled twice refuses."""

    def __init__(self) -> None:
        self.dialled: list[str] = []
        self.linked: list[str] = []

    def peers(self) -> list[str]:
        return self.linked

    def join(self, peer: str, address: str) -> None:
        if address in self.dialled:
            raise HandshakeError(f"attention-0 is linked to {peer} already")
        self.dialled.append(address)


def test_a_link_that_is_about_to_be_one_is_not_dialled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(attention_rank, "monotonic_s", lambda: now_s)
    links = Links()
    join = Joining(cast(Endpoint, links))
    join({"expert-0": "tcp:a"})
    join({"expert-0": "tcp:a", "expert-1": "tcp:b"})
    assert links.dialled == ["tcp:a", "tcp:b"]
    links.linked = ["expert-0"]
    now_s += 2 * NEW_S
    with pytest.raises(HandshakeError, match="cannot join expert-1"):
        join({"expert-0": "tcp:a", "expert-1": "tcp:b"})
    join({"expert-1": "tcp:elsewhere"})
    assert links.dialled == ["tcp:a", "tcp:b", "tcp:elsewhere"]
