"""Frames between the ingress and the attention ranks.

A connection opens with a mutual challenge (actors/channels/handshake.py). Then each side sends
frames (contracts/frames.py), each one msgpack map tagged by `type`. The ingress sends
`Submit` and `Cancel`; a rank answers with `Events`, one frame per step for all sequences of that
connection (so a token costs a few bytes, not a call). A prefill worker adds its log
(contracts/routing_messages.py): a `WorkerSnapshot` on connecting, then every `WorkerReport`, to all
clients in the same order and in the frame of the answers that it goes with.
"""

from __future__ import annotations

import msgspec

from contracts.block_hash import chain_hashes
from contracts.requests import Caller, Priority, Sampling, Usage
from contracts.routing_messages import RequestKey, WorkerReport, WorkerSnapshot

MAX_FRAME_BYTES = 64 << 20
STATE_PERIOD_S = 0.25  # of a rank: by this its clients know that it lives


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A sequence to run.

    `sampling` None means a prefill-only job: nothing is generated and the answer is a `Scored`.
    `candidates`: token ids whose logits at the last prompt position are wanted.
    `score_from`: if set, the log-probability of each prompt token at positions >= score_from,
    given all before it, is wanted (score_from >= 1). `score_top`: with score_from, how many
    alternatives per scored position are wanted as well. `key`: what a router calls the request, and
    the worker's reports with it; None: no router placed it. `caller`: whose it is. `waited_s`: for
    how long it has waited already (an age: clocks of nodes differ).

    `generated`: of a generation that another rank began, so many of the last `token_ids` are not
    the client's prompt, but were generated there. `sampling` is what the client asked for, and
    counts them: max_tokens and min_tokens, penalties, choices, draws.

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

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) - self.generated

    @property
    def prefill_only(self) -> bool:
        """Whether its answer is read from the logits of one pass."""
        return self.sampling is None or self.sampling.max_tokens <= 1

    def block_hashes(self, block_tokens: int) -> list[bytes]:
        """Of the prompt's full blocks, as every cache and every table of them names them."""
        return chain_hashes(self.token_ids, block_tokens, salt=self.caller.salt)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end what is generated, and are no part of its text. With choices an eos does
        in any case: it comes only where one of them is complete."""
        sampling = self.sampling
        if sampling is None:
            return frozenset()
        eos = () if sampling.ignore_eos and sampling.choices is None else self.eos_token_ids
        return frozenset((*eos, *sampling.stop_token_ids))


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: int


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural log) of the chosen token, and the `top` alternatives."""

    logprob: float
    top: list[tuple[int, float]] = []


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """Newly generated tokens of a sequence, in order. An eos token is included.

    cached_tokens: prompt tokens that came from the prefix cache, stated with the first tokens (a
    sequence that a stop string ends never gets as far as its `Finished`).
    """

    request_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int | None = None


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A generation ended. reason: "stop" (eos) or "length"."""

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


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A sequence ended with an error. `code` is a `TandemError.code`. retry_after_s: of a 429."""

    request_id: int
    code: str
    message: str
    status: int = 500
    retry_after_s: float | None = None


class RankState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """What an ingress must know of a rank; sent on connecting, when it changes, and every
    STATE_PERIOD_S. stuck: its loop hangs, so that nothing that waits there will be answered.
    leaving: it takes nothing new, and hands over what it has not ended in time. waits: expert ranks
    are lost, and nobody stands in: nothing goes on there until they are back."""

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
