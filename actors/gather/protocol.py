"""Protocol between a worker and a peer that gathers weights from it.

After the handshake (purpose "weights", `Terms` on both sides; over shared memory the server's first
byte carries the segment's descriptor), on one connection per direction:

    peer    FETCH layer                                  DONE layer
    server              (KEEPALIVE ...)  DATA layer | bytes
                                                          over shared memory: an offset, no bytes

One layer at a time. KEEPALIVE is a sign of life while a layer comes from the host store. The slot
may be overwritten after DONE, or once the connection is closed.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from contracts.errors import HandshakeError
from contracts.messages import FRAME_ERRORS
from contracts.placement import placement_mismatch
from models.spec.model import ModelSpec

PURPOSE = "weights"
FETCH, DONE = 1, 2
KEEPALIVE, DATA, FAILED = 1, 2, 3
REQUEST = struct.Struct("<BI")  # kind, layer
REPLY = struct.Struct("<BIQ")  # kind, layer; bytes that follow, or the offset in the segment


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """Properties that both sides must agree on before weights move.

    epoch: the worker's incarnation; older ones of a name are refused. model_digest: of the model's
    shape and dtype. layout: of experts in memory (models/experts/expert_layout.py). placement:
    digest of the placement. segment_bytes: payload of the server's segment, over shared memory.
    """

    epoch: int
    model_digest: bytes
    layout: bytes
    placement: str = ""
    segment_bytes: int = 0


# Built at import: msgspec crashes when two threads build the first decoder of a type at once.
_decode = msgspec.msgpack.Decoder(Terms).decode


def digest(model: ModelSpec, dtype: str) -> bytes:
    return hashlib.sha256(msgspec.json.encode((model, dtype))).digest()


def read_terms(extra: bytes, name: str) -> Terms:
    try:
        return _decode(extra)
    except FRAME_ERRORS:
        raise HandshakeError(f"{name} did not request weights") from None


def check_terms(remote: Terms, local: Terms, name: str, newest_epoch: int) -> None:
    """Raise HandshakeError unless the terms match."""
    if remote.model_digest != local.model_digest:
        raise HandshakeError(
            f"{name} holds experts of another model or dtype: start all prefill workers with the "
            "same configuration"
        )
    if remote.placement != local.placement:
        raise HandshakeError(placement_mismatch(name, remote.placement, local.placement))
    if remote.layout != local.layout:
        raise HandshakeError(
            f"{name} lays experts out in another way, for another processor: set "
            "prefill.packed_experts=false on all prefill workers"
        )
    if remote.epoch < newest_epoch:
        raise HandshakeError(
            f"{name} is at epoch {remote.epoch}, which has been replaced by {newest_epoch}"
        )
