"""Generations on lost ranks: the same answer wherever resumed; the limit of attempts."""

import asyncio
from collections.abc import Sequence as SequenceOf
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.batching.batch_builder import Chunk
from actors.batching.finisher import Finisher
from actors.batching.sequence import Sequence
from cluster.routing.pipeline_backend import PipelineBackend
from cluster.routing.rank_set import RankSet, RoutingConfig
from cluster.routing.ticket import Ticket
from contracts.errors import PeerDeadError, RankError
from contracts.messages import Failed, Finished, SequenceEvent, Submit, TokenLogprob, Tokens
from contracts.requests import Sampling, Usage
from tests.property.sampling_requests import VOCABULARY, requests

EOS = 0
MOST = 12


class Half:
    """A model whose logits follow from a digest of the tokens so far."""

    def row_logits(self, hidden_TD: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, None]:
        (row,) = (torch.Generator().manual_seed(int(hidden_TD[each, 0])) for each in rows)
        return 2 * torch.randn(1, VOCABULARY, generator=row), None


def events_of_rank(submit: Submit) -> list[SequenceEvent]:
    """Generate on a rank that has the whole prompt cached."""
    half: Any = Half()
    finisher, found = Finisher(half, max_context_tokens=1000), list[SequenceEvent]()
    sequence = Sequence((0, 1), submit, 4)
    sequence.num_cached = len(submit.token_ids)
    while not sequence.done:
        last = len(sequence.token_ids) - 1
        digest = hash(tuple(sequence.token_ids)) & 0xFFFFFF
        batch: Any = SimpleNamespace(sequences=[SimpleNamespace(first=0, start=last)])
        chunk = Chunk(sequence, last, last + 1, frozenset())
        list(finisher([chunk], batch, torch.tensor([[digest]])))
    for _, event in finisher.answers:
        assert isinstance(event, SequenceEvent)
        found.append(event)
    return found


class ClientView(NamedTuple):
    """Return what the client receives."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    cached: list[int]
    end: SequenceEvent


def client_view(events: SequenceOf[SequenceEvent]) -> ClientView:
    *tokens, end = events
    assert isinstance(end, Finished | Failed)
    found = ClientView([], [], [], end)
    for event in tokens:
        assert isinstance(event, Tokens)
        found.tokens.extend(event.token_ids)
        found.logprobs.extend(event.logprobs or ())
        found.cached.extend([] if event.cached_tokens is None else [event.cached_tokens])
    return found


def cut_off(submit: Submit, cuts: SequenceOf[int]) -> ClientView:
    """Generate on ranks that are lost after some tokens each, except the last."""
    ticket = Ticket(submit, wait_for_slot=False, on_lost=lambda *_: None)
    for cut in [*cuts, 2 * MOST]:
        for event in events_of_rank(ticket.submit)[:cut]:
            ticket.put(event)
        if ticket.ended or not ticket.resume():
            break
    return client_view(asyncio.run(ticket.next_batch()))


@given(requests(), st.lists(st.integers(0, 6), max_size=4), st.sampled_from([None, 0, 2]))
def test_generation_is_independent_of_where_it_is_resumed(
    request: tuple[Sampling, list[int]], cuts: list[int], logprobs: int | None
) -> None:
    fields, prompt = request
    sampling = msgspec.structs.replace(fields, max_tokens=MOST, logprobs=logprobs)
    submit = Submit(request_id=0, token_ids=prompt, sampling=sampling, eos_token_ids=[EOS])
    whole = client_view(events_of_rank(submit))
    assert cut_off(submit, cuts) == whole
    assert not isinstance(whole.end, Failed)
    if whole.tokens:
        assert whole.cached == [len(prompt)]
        assert cut_off(submit, [len(whole.tokens)]) == whole, "its end alone was missing"


def test_unseeded_generation_resumes_with_new_draws() -> None:
    """Draws differ from those before the resume."""
    sampling = Sampling(max_tokens=40, temperature=2.0, ignore_eos=True)
    submit = Submit(request_id=0, token_ids=[1], sampling=sampling)
    parts = [cut_off(submit, [20]).tokens for _ in range(2)]
    assert parts[0] != parts[1]
    assert parts[0][20:] != parts[0][:20]


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

    def __init__(self, gives: SequenceOf[int]) -> None:
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


def generated(gives: SequenceOf[int]) -> Generated:
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
def test_generation_fails_after_three_losses_within_few_tokens(gives: list[int]) -> None:
    result = generated(gives)
    assert result.tokens == list(range(len(result.tokens))), "no token is lost or repeated"
    ends = len(result.lost_after)
    assert ends <= (MOST_ENDS - 1) * (len(result.tokens) // RESET_TOKENS) + MOST_ENDS
    if result.given_up:
        message = f"{MOST_ENDS} attention ranks were lost with this request"
        assert result.given_up.startswith(message)
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
