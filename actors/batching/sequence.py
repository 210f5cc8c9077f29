"""State of one request on an attention rank, and the token budget of a batch."""

from __future__ import annotations

import logging
import math
import secrets
from collections import Counter, abc, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from actors.batching.grammar_matcher import GrammarMatcher
from actors.batching.sampler import logits_processor
from contracts.config import ScheduleConfig
from contracts.errors import OverloadError, TandemError
from contracts.logs import event
from contracts.messages import Failed, Submit, TokenLogprob
from contracts.requests import Priority, Usage, chain_hashes
from planner.scheduling.batching import Phase
from planner.scheduling.fair_queue import TenantLimit, fair_limits

SHARED_BATCHES = 32  # batches that stay shared after other requests were last present


class Owner(NamedTuple):
    """Request that a sequence belongs to.

    request: client (one connection to the rank) and request number. priority: a plain number,
    because owners are hashed for every sequence of every batch.
    """

    tenant: bytes
    request: tuple[int, int]
    priority: int


def owner_of(client: int, submit: Submit) -> Owner:
    caller = submit.caller
    return Owner(caller.tenant, (client, caller.request), int(submit.priority))


class SequenceCounts:
    """Sequences of each request, waiting or running. BE shares with LS, LS not with BE."""

    def __init__(self) -> None:
        self._counts: list[defaultdict[bytes, Counter[Hashable]]] = [
            defaultdict(Counter) for _ in Priority
        ]
        self._totals = [0 for _ in Priority]
        self._shared_until = dict.fromkeys(Priority, 0)

    def add(self, owner: Owner) -> None:
        self._totals[owner.priority] += 1
        self._counts[owner.priority][owner.tenant][owner.request] += 1

    def remove(self, owner: Owner) -> None:
        self._totals[owner.priority] -= 1
        tenants = self._counts[owner.priority]
        requests = tenants[owner.tenant]
        requests[owner.request] -= 1
        if not requests[owner.request]:
            del requests[owner.request]
        if not requests:
            del tenants[owner.tenant]

    def count(self, owner: Owner) -> int:
        requests = self._counts[owner.priority].get(owner.tenant)
        return requests[owner.request] if requests else 0

    def total(self, priority: Priority) -> int:
        return self._totals[priority]

    def shared(self, priority: Priority, batch: int, classes: abc.Sequence[Priority]) -> bool:
        """Return whether a class shares this batch with other requests, or did recently."""
        if self._has_several(priority, classes):
            self._shared_until[priority] = batch + SHARED_BATCHES
        return batch < self._shared_until[priority]

    def _has_several(self, lowest: Priority, classes: abc.Sequence[Priority]) -> bool:
        """Return whether these classes, down to the lowest, have more than one request."""
        seen = None
        for priority in classes:
            for tenant, requests in self._counts[priority].items():
                if priority > lowest:
                    return False
                first = tenant, next(iter(requests))
                if len(requests) > 1 or seen not in (None, first):
                    return True
                seen = first
        return False

    def parts(
        self, priority: Priority, places: int, classes: abc.Sequence[Priority]
    ) -> Mapping[bytes, TenantLimit]:
        """Return the limits of those tenants of a class that exceed their part of a batch."""
        before = (self._counts[each] for each in classes if each < priority)
        taken = sum(sum(map(Counter.total, tenants.values())) for tenants in before)
        return fair_limits(self._counts[priority], max(1, places - taken))


@dataclass(slots=True, eq=False)
class _Remaining:
    """Budget of one request, or of all requests of a tenant."""

    tokens: int
    places: int
    tenant: _Remaining | None = None


class BatchBudget:
    """Token and place budget of a batch.

    Tokens reserved by `reserve_tokens` are left for waiting sequences while running ones take
    theirs.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        sequence_counts: SequenceCounts,
        batch: int,
        classes: abc.Sequence[Priority] = tuple(Priority),
    ) -> None:
        """classes: those of the batch, in order."""
        self.tokens = config.max_batch_tokens
        self.places = config.max_batch_sequences
        self._reserved_tokens = 0
        self._max_tokens_per_request = share_of(config.request_share, self.tokens)
        self._max_places_per_request = share_of(config.request_share, self.places)
        self._remaining: dict[Owner, _Remaining] = {}
        self._tenants: dict[tuple[int, bytes], _Remaining] = {}
        self._parts: dict[int, Mapping[bytes, TenantLimit]] = {  # of the shared classes
            int(priority): sequence_counts.parts(priority, self.places, classes)
            for priority in classes
            if sequence_counts.shared(priority, batch, classes)
        }
        self.is_shared = bool(self._parts)

    @property
    def is_full(self) -> bool:
        return self.tokens <= self._reserved_tokens or self.places == 0

    def reserve_tokens(self, tokens: int) -> None:
        self._reserved_tokens = tokens

    def tokens_for(self, owner: Owner) -> int:
        """Return how many tokens of one more sequence fit; 0: none."""
        tokens = self.tokens - self._reserved_tokens
        if tokens <= 0 or self.places == 0:
            return 0
        if owner.priority not in self._parts:
            return tokens
        remaining = self._remaining.get(owner) or self._account(owner)
        if remaining.places <= 0 or (remaining.tenant is not None and remaining.tenant.places <= 0):
            return 0
        return max(0, min(tokens, remaining.tokens))

    def take(self, owner: Owner, tokens: int) -> None:
        """Subtract a chunk. A whole prompt may exceed the budget."""
        self.tokens = max(0, self.tokens - tokens)
        self.places -= 1
        remaining = self._remaining.get(owner)
        if remaining is not None:
            remaining.tokens -= tokens
            remaining.places -= 1
            if remaining.tenant is not None:
                remaining.tenant.places -= 1

    def _account(self, owner: Owner) -> _Remaining:
        part = self._parts[owner.priority].get(owner.tenant)
        tenant = None
        max_places = self._max_places_per_request
        if part is not None:
            max_places = min(max_places, part.per_request)
            tenant = self._tenants.setdefault(
                (owner.priority, owner.tenant),
                _Remaining(self._max_tokens_per_request, part.places),
            )
        remaining = self._remaining[owner] = _Remaining(
            self._max_tokens_per_request, max_places, tenant
        )
        return remaining


def share_of(share: float, whole: int) -> int:
    """Return a share of `whole`, at least 1."""
    return max(1, math.floor(share * whole))


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
        self.state_slot: int | None = None  # of recurrent states, while it has blocks
        self.shared_blocks = 0  # found when it started, with or without a checkpoint
        self.num_computed = 0
        self.num_cached: int | None = None  # set when it first starts
        self.arrived_s = 0.0  # on the rank's clock, of which due_s is too
        self.queued_s: float | None = None  # from then to its first batch, if requested
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
    def grammar(self) -> GrammarMatcher | None:
        return None if self.logits_processor is None else self.logits_processor.grammar

    @property
    def is_ready(self) -> bool:
        """False while its grammar is compiled."""
        return self.grammar is None or self.grammar.is_ready

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
