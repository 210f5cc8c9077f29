"""Lost ranks that a generation survives: any number with progress, three without."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.pipeline_backend import PipelineBackend
from cluster.routing.rank_set import RankSet, RoutingConfig
from cluster.routing.ticket import Ticket
from contracts.errors import PeerDeadError, RankError
from contracts.messages import Finished, Submit, Tokens
from contracts.requests import Sampling, Usage

CONFIG = RoutingConfig()
MOST_ENDS, RESET_TOKENS = CONFIG.max_attempts, CONFIG.attempt_reset_tokens
ENDLESS = 10_000


class Client:
    """A rank that returns whenever it is lost."""

    name, connections, waits = "attention-0", 0, False

    def post(self, *_: Any) -> int:
        self.connections += 1
        return self.connections

    def cancel(self, request_id: int) -> None: ...


class LostRanks:
    """A placer whose ranks are lost after some tokens each, except the last."""

    config = CONFIG

    def __init__(self, gives: Sequence[int]) -> None:
        self._gives = [*gives, ENDLESS]
        self.ranks: RankSet[Any] = RankSet("attention rank", [], 60.0, print, None)
        self.client: Any = Client()
        self.lost_after: list[int] = []  # tokens that had come in all, for each loss

    def put(self, ticket: Ticket) -> None:
        ticket.send(self.client)
        asyncio.get_running_loop().call_soon(self._serve, ticket, self._gives.pop(0))

    def _serve(self, ticket: Ticket, tokens: int) -> None:
        submit = ticket.submit
        assert submit.sampling is not None
        for number in range(min(tokens, submit.sampling.max_tokens - submit.generated)):
            ticket.put(Tokens(0, [submit.generated + number]))
        if tokens == ENDLESS:
            ticket.put(Finished(0, "length", Usage(prompt_tokens=1, completion_tokens=1)))
            return
        self.lost_after.append(submit.generated + tokens)
        ticket.on_rank_lost(PeerDeadError("attention-0 is gone", "attention-0"))

    def record_answer(self, ticket: Ticket) -> None: ...

    def remove(self, ticket: Ticket) -> None: ...


class Generated(NamedTuple):
    tokens: list[int]
    given_up: str
    lost_after: list[int]


def generated(gives: Sequence[int]) -> Generated:
    placer: Any = LostRanks(gives)

    async def body() -> Generated:
        tokens: list[int] = []
        sampling = Sampling(max_tokens=sum(gives) + 1, ignore_eos=True)
        submit = Submit(request_id=0, token_ids=[7], sampling=sampling)
        try:
            async for batch in PipelineBackend(placer).generate(submit):
                for event in batch:
                    tokens += event.token_ids if isinstance(event, Tokens) else []
        except RankError as error:
            return Generated(tokens, error.message, placer.lost_after)
        return Generated(tokens, "", placer.lost_after)

    return asyncio.run(asyncio.wait_for(body(), 5.0))


@given(st.lists(st.integers(0, 3)) | st.lists(st.integers(0, 2 * RESET_TOKENS), max_size=12))
def test_generation_fails_after_three_losses_within_few_tokens(
    gives: list[int],
) -> None:
    result = generated(gives)
    assert result.tokens == list(range(len(result.tokens))), "no token is lost or repeated"
    ends = len(result.lost_after)
    assert ends <= (MOST_ENDS - 1) * (len(result.tokens) // RESET_TOKENS) + MOST_ENDS
    if result.given_up:
        assert result.given_up.startswith(
            f"{MOST_ENDS} attention ranks were lost with this request"
        )
        *_, first, _, last = result.lost_after
        assert last - first < RESET_TOKENS, "failed in spite of progress"
    else:
        assert len(result.tokens) == sum(gives) + 1


@given(st.lists(st.integers(RESET_TOKENS // 2, RESET_TOKENS), min_size=20, max_size=40))
def test_generation_that_progresses_survives_any_number_of_lost_ranks(gives: list[int]) -> None:
    assert not generated(gives).given_up


@given(st.integers(0, 5), st.integers(0, 200))
def test_generation_that_ends_every_rank_at_one_token_fails_after_three(
    generated_tokens: int, before: int
) -> None:
    """Independent of earlier progress on other ranks."""
    result = generated([before, generated_tokens, 0, 0, 0])
    assert result.given_up
    assert result.lost_after[-1] == before + generated_tokens
    assert len(result.lost_after) <= 5
