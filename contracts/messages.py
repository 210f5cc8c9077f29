"""Frames between the ingress and the ranks that serve requests.

A connection opens with a mutual challenge (actors/channels/handshake.py). Then each side sends
frames: a 4-byte little-endian length, then one msgpack map tagged by `type`. The ingress sends
`Submit` and `Cancel`; a rank answers with `Events`, one frame per step for all sequences of the
connection, so that a token costs a few bytes instead of a call. A prefill worker adds its log
(contracts/routing_messages.py): a `WorkerSnapshot` on connecting, then every `WorkerReport`, to all
clients in the same order and in the frame of the answers it belongs to.
"""

import asyncio
import struct

import msgspec

from contracts.requests import Caller, Priority, Sampling, Usage, chain_hashes
from contracts.routing_messages import RequestKey, WorkerReport, WorkerSnapshot

# Raised for an invalid frame. msgspec raises RecursionError for a deeply nested one.
FRAME_ERRORS = (msgspec.MsgspecError, RecursionError)

_PREFIX = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size


def encode_frame(body: bytes) -> bytes:
    return _PREFIX.pack(len(body)) + body


def frame_size(prefix: bytes, max_bytes: int) -> int:
    """Return the size of a frame. Raises msgspec.DecodeError unless it is 1 to `max_bytes`."""
    size: int = _PREFIX.unpack(prefix)[0]
    if not 0 < size <= max_bytes:
        raise msgspec.DecodeError(f"a frame of {size} bytes, where 1 to {max_bytes} are accepted")
    return size


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Return the body of the next frame. Raises msgspec.DecodeError and the reader's errors."""
    return await reader.readexactly(frame_size(await reader.readexactly(PREFIX_BYTES), max_bytes))


MAX_FRAME_BYTES = 64 << 20
STATE_PERIOD_S = 0.25


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A sequence to run.

    sampling: None for a prefill-only job, which generates nothing and is answered by `Scored`.
    candidates: token ids whose logits at the last prompt position are requested. score_from: if set
    (>= 1), the log-probability of each prompt token at positions >= score_from, given all before
    it, is requested. score_top: alternatives per scored position. key: the router's name of the
    request, used in the worker's reports; None without a router. caller: origin of the request.
    waited_s: time already waited (a duration, since clocks of nodes differ). timed: queued_s, the
    time until its first batch including waited_s, is requested.

    generated: number of the last `token_ids` that another rank generated for this request.
    `sampling` is the client's and counts them: max_tokens, min_tokens, penalties, choices, draws.

        token_ids   | prompt ........................ | generated .... |
                    0                     prompt_tokens      len(token_ids)
    """

    request_id: int
    token_ids: list[int]
    sampling: Sampling | None
    priority: Priority = Priority.LS
    candidates: list[int] | None = None
    score_from: int | None = None
    score_top: int = 0
    eos_token_ids: list[int] = []
    key: RequestKey | None = None
    caller: Caller = Caller()
    waited_s: float = 0.0
    generated: int = 0
    timed: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) - self.generated

    @property
    def prefill_only(self) -> bool:
        """True if one pass is enough for the answer."""
        return self.sampling is None or self.sampling.max_tokens <= 1

    def block_hashes(self, block_tokens: int) -> list[bytes]:
        return chain_hashes(self.token_ids, block_tokens, salt=self.caller.salt)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Return the tokens that end the generation and are not part of its text.

        With choices or a grammar, eos always does: it is sampled only after a complete text.
        """
        sampling = self.sampling
        if sampling is None:
            return frozenset()
        eos = () if sampling.ignore_eos and not sampling.has_structure else self.eos_token_ids
        return frozenset((*eos, *sampling.stop_token_ids))


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: int


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithm of the probability of the chosen token, and the `top` alternatives."""

    logprob: float
    top: list[tuple[int, float]] = []


class Tokens(msgspec.Struct, frozen=True, omit_defaults=True, tag="tokens"):
    """New tokens of a sequence, in order, including an eos token.

    cached_tokens: prompt tokens from the prefix cache, sent with the first tokens, because a
    sequence that a stop string ends never sends `Finished`. queued_s: see `Submit.timed`.
    """

    request_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int | None = None
    queued_s: float | None = None


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """End of a generation. reason: "stop" (eos) or "length"."""

    request_id: int
    reason: str
    usage: Usage


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """The answer of a prefill-only job.

    candidate_logits: raw logits in the order of `Submit.candidates`.
    candidate_logprobs: the same, as log-softmax over the whole vocabulary.
    token_logprobs: one per prompt token at positions >= `Submit.score_from`.
    token_tops: for the same positions, `Submit.score_top` alternatives, most probable first.
    """

    request_id: int
    usage: Usage
    candidate_logits: list[float] | None = None
    candidate_logprobs: list[float] | None = None
    token_logprobs: list[float] | None = None
    token_tops: list[list[tuple[int, float]]] | None = None
    queued_s: float | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Error that ended a sequence. code: a `TandemError.code`. retry_after_s: of a 429."""

    request_id: int
    code: str
    message: str
    status: int = 500
    retry_after_s: float | None = None


class RankState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """State of a rank; sent on connecting, when it changes, and every STATE_PERIOD_S.

    stuck: its loop hangs and will not answer. leaving: it drains: accepts nothing new and hands
    over what it does not complete in time. waits: expert ranks are lost without replacement, and
    its work is paused until they return.
    """

    rank: str
    healthy: bool
    reason: str = ""
    total_blocks: int = 0
    stuck: bool = False
    leaving: bool = False
    waits: bool = False


SequenceEvent = Tokens | Finished | Scored | Failed
Event = SequenceEvent | RankState | WorkerReport | WorkerSnapshot


class Events(msgspec.Struct, frozen=True, tag="events"):
    items: list[Event]


ToRank = Submit | Cancel
