"""How many lost ranks a generation may meet: as many as there are while it gives tokens, three
while it gives none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.admission import Admission
from cluster.routing.placer import RoutingConfig
from cluster.routing.ticket import Ticket
from contracts.errors import PeerDeadError, RankError
from contracts.messages import Finished, Submit, Tokens
from contracts.requests import Sampling, Usage

CONFIG = RoutingConfig()
MOST_ENDS, FORGIVING = CONFIG.max_attempts, CONFIG.forgiving_tokens
ENDLESS = 10_000


class Client:
    """Of a rank that comes again whenever it is lost."""

    name, connections, waits = "attention-0", 0, False

    def post(self, *_: Any) -> int:
        self.connections += 1
        return self.connections

    def cancel(self, request_id: int) -> None: ...


class LostRanks:
    """A placer. Each rank is lost after it has given so many tokens; the last one goes on to the
    end."""

    kind, config = "attention rank", CONFIG

    def __init__(self, gives: Sequence[int]) -> None:
        self._gives = [*gives, ENDLESS]
        self.peers: Any = []
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
        ticket.lose(PeerDeadError("attention-0 is gone", "attention-0"))

    def listen(self, on_present: Callable[[], None]) -> None: ...

    def answered(self, ticket: Ticket) -> None: ...

    def remove(self, ticket: Ticket) -> None: ...


class Came(NamedTuple):
    tokens: list[int]
    given_up: str
    lost_after: list[int]


def generated(gives: Sequence[int]) -> Came:
    placer: Any = LostRanks(gives)

    async def body() -> Came:
        tokens: list[int] = []
        sampling = Sampling(max_tokens=sum(gives) + 1, ignore_eos=True)
        submit = Submit(request_id=0, token_ids=[7], sampling=sampling)
        try:
            async for batch in Admission(placer).generate(submit):
                for event in batch:
                    tokens += event.token_ids if isinstance(event, Tokens) else []
        except RankError as error:
            return Came(tokens, error.message, placer.lost_after)
        return Came(tokens, "", placer.lost_after)

    return asyncio.run(asyncio.wait_for(body(), 5.0))


@given(st.lists(st.integers(0, 3)) | st.lists(st.integers(0, 2 * FORGIVING), max_size=12))
def test_it_is_given_up_by_name_after_three_ends_within_few_tokens_and_else_has_all(
    gives: list[int],
) -> None:
    came = generated(gives)
    assert came.tokens == list(range(len(came.tokens))), "none is lost, none comes twice"
    ends = len(came.lost_after)
    assert ends <= (MOST_ENDS - 1) * (len(came.tokens) // FORGIVING) + MOST_ENDS
    if came.given_up:
        assert came.given_up.startswith(f"{MOST_ENDS} attention ranks were lost with this request")
        *_, first, _, last = came.lost_after
        assert last - first < FORGIVING, "it was given up though it had come on"
    else:
        assert len(came.tokens) == sum(gives) + 1


@given(st.lists(st.integers(FORGIVING // 2, FORGIVING), min_size=20, max_size=40))
def test_ends_without_number_end_nothing_that_comes_on_between_them(gives: list[int]) -> None:
    assert not generated(gives).given_up


@given(st.integers(0, 5), st.integers(0, 200))
def test_what_ends_every_rank_at_one_place_is_given_up_after_three(gave: int, before: int) -> None:
    """Whatever it had given before that place, on ranks that were lost for other reasons."""
    came = generated([before, gave, 0, 0, 0])
    assert came.given_up
    assert came.lost_after[-1] == before + gave
    assert len(came.lost_after) <= 5
