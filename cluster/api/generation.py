"""What chat and completions have in common: prompts and options become sequences, and these one
answer or a stream of chunks. How an answer is worded is the endpoint's (`Wording`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.answer_types import TokenUsage
from cluster.api.answers import (
    Collected,
    Deltas,
    Json,
    LogprobsJson,
    Tally,
    collect,
    header,
    json_list,
    json_object,
    pieces_response,
)
from cluster.api.body import body_of
from cluster.api.callers import salted
from cluster.api.checks import check_priority
from cluster.api.echo import Echo, echo
from cluster.api.merging import merged
from cluster.api.schemas import GenerationBody, GenerationOptions
from cluster.api.session import DONE, EventStream, Services, Session, sse
from cluster.api.text import Delta, SequenceText, ShownToken
from cluster.classification.bounded import map_bounded
from contracts.messages import Submit
from contracts.metrics import Pipeline
from contracts.requests import Sampling, Usage
from models.text.tokenizer import Tokenizer

CONCURRENT_ECHOES = 64


class Prompt(msgspec.Struct, frozen=True):
    """text: what `echo` gives back."""

    token_ids: list[int]
    sampling: Sampling
    text: str = ""


class Job(msgspec.Struct, frozen=True):
    """What a body asks for, checked. lists_eos: a choice's end-of-sequence token is
    among the tokens that have log-probabilities."""

    prompts: list[Prompt]
    options: GenerationOptions
    echo: bool = False
    lists_eos: bool = False

    @property
    def count(self) -> int:
        return len(self.prompts) * self.options.n

    @property
    def prefill_only(self) -> bool:
        """Whether one pass over each prompt is all of it."""
        return self.options.max_tokens == 0 or all(
            prompt.sampling.max_tokens <= 1 for prompt in self.prompts
        )

    def prompt_of(self, index: int) -> int:
        """Choices are ordered by prompt, then by repetition."""
        return index // self.options.n


class Wording(Protocol):
    """prefix: of an answer's id. whole, chunk: names of an answer and of a piece of a stream."""

    prefix: str
    whole: str
    chunk: str

    def logprobs(self) -> LogprobsJson | None:
        """Where those of a choice are collected; None: not wanted."""

    def choice(self, index: int, choice: Collected) -> dict[str, Any]:
        """In a whole answer, but for its log-probabilities."""

    def pieces(self, index: int, delta: Delta) -> Sequence[dict[str, Any]]:
        """In a stream: what each chunk says of the choice."""


Body = TypeVar("Body", bound=GenerationBody)
Check = Callable[[Services, Session, Body], Awaitable[Job]]
Word = Callable[[Tokenizer, int | None], Wording]


async def generation(
    services: Services,
    session: Session,
    request: Request,
    kind: type[Body],
    check: Check[Body],
    word: Word,
) -> Response:
    """check: makes a job of a body of this kind, or raises TandemError. word: given how many
    alternatives to each token are to be told; None: no log-probabilities."""
    body = await body_of(services, session, request, kind)
    session.set_priority(check_priority(body, default=session.priority))
    session.caller = salted(session.caller, body.cache_salt)

    async def respond() -> Response:
        job = await check(services, session, body)
        if job.prefill_only:
            session.pipeline = Pipeline.PREFILL
        wording = word(services.tokenizer, job.options.sampling.logprobs)
        run = _Run(services, session, job, wording)
        if job.options.stream:
            return await EventStream.open(session, run.frames())
        return pieces_response(await run.answer())

    return await session.run(respond())


class _Run:
    """A job at work: its deltas, as one answer or as a stream of chunks."""

    def __init__(self, services: Services, session: Session, job: Job, wording: Wording) -> None:
        self._services = services
        self._session = session
        self._job = job
        self._wording = wording
        self._usages: dict[int, Usage] = {}

    def _header(self, kind: str) -> dict[str, Any]:
        return header(self._wording.prefix, kind, self._services.model.name)

    async def answer(self) -> Json:
        wording, account = self._wording, self._session.account
        choices = [Collected(wording.logprobs(), account) for _ in range(self._job.count)]
        await collect(self._deltas(), choices)
        told = [
            json_object(wording.choice(index, choice), {"logprobs": choice.logprobs})
            for index, choice in enumerate(choices)
        ]
        head = {**self._header(wording.whole), "usage": self._usage()}
        return json_object(head, {"choices": json_list(told)})

    async def frames(self) -> AsyncGenerator[bytes, None]:
        head, wording = self._header(self._wording.chunk), self._wording
        usage = {"usage": None} if self._job.options.include_usage else {}
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                for piece in wording.pieces(index, delta):
                    yield sse({**head, "choices": [piece], **usage})
        if usage:
            yield sse({**head, "choices": [], "usage": self._usage()})
        yield DONE

    def _usage(self) -> TokenUsage:
        tally = Tally()
        for index, usage in sorted(self._usages.items()):
            tally.add(self._job.prompt_of(index), usage)
        return tally.told()

    def _deltas(self) -> Deltas:
        return self._echoed() if self._job.echo else self._generated()

    async def _echoed(self) -> Deltas:
        """Each choice's echo first, then what is generated, its tokens shifted behind the echo."""
        job = self._job
        echoes = await map_bounded(self._echo, range(len(job.prompts)), CONCURRENT_ECHOES)
        for index in range(job.count):
            async for delta in echoes[job.prompt_of(index)].deltas():
                yield index, delta
        if job.options.max_tokens == 0:
            return
        async with aclosing(self._generated()) as generated:
            async for index, delta in generated:
                yield index, _shifted(delta, len(job.prompts[job.prompt_of(index)].text))

    def _generated(self) -> Deltas:
        count = self._job.count
        return self._sequence(0) if count == 1 else merged(self._sequence, count)

    async def _sequence(self, index: int) -> Deltas:
        """One delta per arrival; the sequence's usage is known when it ends. The first sequence is
        what the request is admitted or refused with."""
        services, session, submit = self._services, self._session, self._submit(index)
        text = SequenceText(
            services.tokenizer,
            prompt_tokens=len(submit.token_ids),
            stops=self._job.options.stops,
            stops_after=submit.sampling.min_tokens if submit.sampling else 0,
            hidden_ids=submit.ending_ids,
            lists_hidden=self._job.lists_eos,
        )
        first_s = last_s = 0.0
        async with aclosing(services.backend.generate(submit, patient=index > 0)) as batches:
            async for batch in batches:
                session.on_token()
                last_s = services.clock()
                first_s = first_s or last_s
                delta = text.push(batch)
                if text.finished:
                    self._usages[index] = text.usage
                    session.on_sequence_end(text.usage, first_s, last_s)
                yield index, delta
                if text.finished:
                    return

    def _submit(self, index: int) -> Submit:
        options = self._job.options
        prompt = self._job.prompts[self._job.prompt_of(index)]
        return Submit(
            request_id=0,
            token_ids=prompt.token_ids,
            sampling=_with_seed(prompt.sampling, index % options.n),
            priority=options.priority,
            eos_token_ids=list(self._services.model.eos_token_ids),
            caller=self._session.caller,
        )

    async def _echo(self, number: int) -> Echo:
        """The echo of prompt `number`; its usage counts where nothing is generated after it."""
        options = self._job.options
        prompt = self._job.prompts[number]
        echoed = await echo(
            *(self._services, prompt.text, prompt.token_ids, options, self._session.caller),
            patient=number > 0,
        )
        if options.max_tokens == 0:
            self._session.on_token()
            self._session.on_sequence_end(echoed.usage, 0.0, 0.0)
            self._usages[number * options.n] = echoed.usage
        return echoed


def _shifted(delta: Delta, characters: int) -> Delta:
    tokens = [ShownToken(t.token_id, t.offset + characters, t.logprob) for t in delta.tokens]
    return msgspec.structs.replace(delta, tokens=tokens)


def _with_seed(sampling: Sampling, repetition: int) -> Sampling:
    """`n` choices of one prompt draw from different seeds: seed, seed + 1, ..."""
    if sampling.seed is None or repetition == 0:
        return sampling
    seed = (sampling.seed + repetition + (1 << 63)) % (1 << 64) - (1 << 63)
    return msgspec.structs.replace(sampling, seed=seed)
