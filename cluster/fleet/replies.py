"""Replies of the launcher. Errors are values, because Serve logs a traceback for exceptions."""

from typing import TypeVar

import msgspec

from contracts.errors import LaunchError, TandemError
from contracts.ranks import RankReady

Reply = TypeVar("Reply")


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """Client addresses of attention ranks and prefill workers, and the token they require."""

    client_addresses: dict[str, str]
    prefill_addresses: dict[str, str]
    token: bytes
    ranks: list[RankReady]


class ScrapeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A process with metrics. address: "host:port/path". group, rank, node: its labels."""

    address: str
    group: str
    rank: str
    node: str


def failure_reply(error: Exception) -> TandemError:
    """Return an error as a reply; one of another library becomes a LaunchError of one line."""
    if isinstance(error, TandemError):
        return error
    return LaunchError(" ".join(f"{type(error).__name__}: {error}".split()))


def checked(reply: Reply | TandemError) -> Reply:
    """Return the reply. Raises it if it is an error."""
    if isinstance(reply, TandemError):
        raise reply
    return reply
