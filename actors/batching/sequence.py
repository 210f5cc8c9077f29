"""State of one request on an attention rank."""

from __future__ import annotations

import logging
import math
import secrets

from actors.batching.batch_budget import owner_of
from actors.batching.logits_processor import logits_processor
from contracts.block_hash import chain_hashes
from contracts.errors import OverloadError, TandemError
from contracts.logs import event
from contracts.messages import Failed, Submit, TokenLogprob
from contracts.requests import Priority, Usage
from planner.scheduling.batching import Phase

SequenceKey = tuple[int, int]  # client, request id: unique on a rank


class Sequence:
    """Tokens so far, and how many of them have K and V in the pool. seed: of its draws.

    token_ids   | prompt ........................ | generated .... |
                | cached | computed by batches .. | next to run    |
                0        num_cached               num_computed      len(token_ids)
    """

    def __init__(self, key: SequenceKey, submit: Submit, block_tokens: int) -> None:
        self.key = key
        self.submit = submit
        self.owner = owner_of(key[0], submit)
        self.token_ids: list[int] = list(submit.token_ids)
        self.prompt_tokens = submit.prompt_tokens
        self.block_tokens = block_tokens
        self.block_table: list[int] = []
        self.num_computed = 0
        self.num_cached: int | None = None  # set when it first starts
        self.arrived_s = 0.0  # on the rank's clock, of which due_s is too
        self.due_s = math.inf  # when its next token is due
        self.in_flight = False
        self.last_batch = -1  # number of the last batch that included it
        self.done = False  # finished or cancelled: ends with its batch
        self.failure: Exception | None = None  # raised by the finisher
        self.scored: list[TokenLogprob] = []
        self.seed = _seed_of(submit)
        self.logits_processor = logits_processor(submit)
        self.end_token_ids = submit.end_token_ids
        self._hashes: list[bytes] = []

    @property
    def priority(self) -> Priority:
        return self.submit.priority

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def phase(self) -> Phase:
        return Phase.PREFILL if self.num_uncomputed > 1 else Phase.DECODE

    @property
    def hashes(self) -> list[bytes]:
        """Chained hashes of the full blocks of `token_ids`."""
        return self.hash_blocks(len(self.token_ids) // self.block_tokens)

    @property
    def hashed_blocks(self) -> int:
        """Number of hashes computed so far."""
        return len(self._hashes)

    def hash_blocks(self, count: int) -> list[bytes]:
        """Return the hashes of at least the first `count` full blocks."""
        if len(self._hashes) < count:
            tokens, length = self.token_ids, count * self.block_tokens
            if length <= len(tokens) - self.block_tokens:
                tokens = tokens[:length]
            salt = self.submit.caller.salt
            self._hashes = chain_hashes(tokens, self.block_tokens, known=self._hashes, salt=salt)
        return self._hashes

    def before_block(self, place: int) -> bytes:
        """Return the hash of the block before block `place`, or the salt."""
        return self.hashes[place - 1] if place else self.submit.caller.salt

    @property
    def first_needed(self) -> int:
        """First position whose hidden state is needed and must be computed, cached or not."""
        last = len(self.token_ids) - 1
        score_from = self.submit.score_from
        return last if score_from is None else min(last, score_from - 1)

    def output_positions(self, start: int, stop: int) -> range:
        """Return the positions in [start, stop) whose logits are needed."""
        return range(max(start, self.first_needed), stop)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.generated,
            cached_tokens=self.num_cached or 0,
        )


def _seed_of(submit: Submit) -> int:
    """Return the client's seed, or a random one."""
    sampling = submit.sampling
    if sampling is None or sampling.seed is None:
        return secrets.randbits(63)
    return sampling.seed


log = logging.getLogger("tandem.worker")


def failure_reply(request_id: int, error: TandemError) -> Failed:
    """Return the answer of a request that ends with `error`."""
    retry_s = error.retry_after_s if isinstance(error, OverloadError) else None
    return Failed(request_id, error.code, error.message, error.status, retry_s)


def logged_failure_reply(submit: Submit, error: Exception, kind: type[TandemError]) -> Failed:
    """Return `failure_reply`; log an unexpected error and reply its type under `kind`'s code."""
    if isinstance(error, TandemError):
        return failure_reply(submit.request_id, error)
    fields = {"request_id": submit.caller.name, "error": type(error).__name__}
    event(log, "sequence_failed", logging.ERROR, error, is_private=True, **fields)
    return failure_reply(
        submit.request_id, kind(f"{type(error).__name__}: see the log of the rank")
    )
