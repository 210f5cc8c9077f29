"""A generation resumed at any token has the same tokens, log-probabilities and end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.batching.finisher import Finisher
from actors.batching.scheduled_batch import Chunk
from actors.batching.sequence import Sequence
from cluster.routing.ticket import Ticket
from contracts.messages import Failed, Finished, SequenceEvent, Submit, TokenLogprob, Tokens
from contracts.requests import Sampling
from tests.property.sampling_requests import VOCABULARY, requests

EOS = 0
MOST = 12


class Half:
    """A model whose logits follow from a digest of the tokens so far."""

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        (row,) = (torch.Generator().manual_seed(int(digest)) for digest in hidden_TD[:, 0])
        return 2 * torch.randn(1, VOCABULARY, generator=row)


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
