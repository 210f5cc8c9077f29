"""Configuration and directory as bytes. Kept out of modules with Serve deployments: module-level
msgspec codecs there cannot be pickled."""

from __future__ import annotations

import msgspec

from contracts.config import TandemConfig
from contracts.worker import RankReady


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """Where the attention ranks of a running group take requests, and the token they want."""

    client_addresses: dict[str, str]
    token: bytes
    backend: str
    epoch: int
    ranks: list[RankReady]


def encode_config(config: TandemConfig) -> bytes:
    return msgspec.json.encode(config)


def decode_config(body: bytes) -> TandemConfig:
    return msgspec.json.decode(body, type=TandemConfig)


def encode_directory(directory: Directory) -> bytes:
    return msgspec.msgpack.encode(directory)


def decode_directory(body: bytes) -> Directory:
    return msgspec.msgpack.decode(body, type=Directory)
