"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.answers import (
    Collected,
    Deltas,
    Json,
    collect,
    header,
    json_list,
    json_object,
    pieces_response,
)
from cluster.api.body import read_body
from cluster.api.callers import salted
from cluster.api.checks import (
    check_logprobs,
    check_model,
    check_options,
    check_supported,
    check_tokens,
    room_for,
)
from cluster.api.cost import (
    COMPLETION_ALTERNATIVE_BYTES,
    generated_answer_bytes,
    scored_bytes,
)
from cluster.api.echo import Echo, echo, text_of
from cluster.api.guided import samplings
from cluster.api.logprobs import CompletionLogprobs, completion_logprobs
from cluster.api.schemas import CompletionBody, GenerationOptions
from cluster.api.sequences import Choice, Tally, run_choices, with_seed
from cluster.api.session import DONE, EventStream, Services, Session, sse
from cluster.api.text import Delta, ShownToken
from cluster.classification.bounded import map_bounded
from contracts.errors import RequestError
from contracts.messages import Submit
from contracts.metrics import Pipeline
from contracts.requests import Sampling, Usage

DEFAULT_MAX_TOKENS = 16
CONCURRENT_ECHOES = 64


class Prompt(msgspec.Struct, frozen=True):
    """text: what `echo` gives back."""

    text: str
    token_ids: list[int]
    sampling: Sampling


class Job(msgspec.Struct, frozen=True):
    prompts: list[Prompt]
    options: GenerationOptions
    echo: bool

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


async def completions(services: Services, session: Session, request: Request) -> Response:
    limit = services.http.max_body_bytes
    body = await session.read(read_body(request, CompletionBody, limit, session.account))
    session.caller = salted(session.caller, body.cache_salt)
    return await session.run(_response(services, session, body))


async def _response(services: Services, session: Session, body: CompletionBody) -> Response:
    job = await _job(services, session, body)
    session.priority = job.options.priority
    if job.prefill_only:
        session.pipeline = Pipeline.PREFILL
    run = _Run(services, session, job)
    if job.options.stream:
        return await EventStream.open(session, run.frames())
    return pieces_response(await run.answer())


async def _job(services: Services, session: Session, body: CompletionBody) -> Job:
    """The request, checked: see `checks.py` for the order."""
    check_supported(body)
    check_model(body.model, services.model)
    options = check_options(
        body, services.model, logprobs=check_logprobs("logprobs", body.logprobs)
    )
    if options.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1 (0 only with echo)", "max_tokens")
    listed = _prompts(body.prompt)
    if len(listed) * options.n > services.http.max_batch_items:
        raise RequestError(
            f"prompt: {len(listed)} prompts times n={options.n} are more than"
            f" {services.http.max_batch_items} (http.max_batch_items)",
            "prompt",
        )
    model, sizes = services.model, []
    default = DEFAULT_MAX_TOKENS
    if options.choices is not None:  # room for any of them, in whatever tokens; it is cut later
        default = 4 * max(len(choice.encode()) for choice in options.choices) + 4
    pool_tokens = services.backend.pool_tokens(
        prefill=options.max_tokens is not None and options.max_tokens <= 1
    )
    token_ids = await _token_ids(services, session, listed)
    for ids in token_ids:
        check_tokens(ids, model, "prompt")
        room = room_for(
            *(len(ids), options, model),
            default=default,
            param="prompt",
            pool_tokens=pool_tokens,
        )
        sizes.append((len(ids), room))
    _check_cost(services, session, options, sizes, echo=bool(body.echo))
    with_rooms = [(ids, room) for ids, (_, room) in zip(token_ids, sizes, strict=True)]
    sampled = await samplings(services.tokenizing, with_rooms, options, model)
    prompts = []
    for number, (ids, sampling) in enumerate(zip(token_ids, sampled, strict=True)):
        text = await _echo_text(services, listed[number]) if body.echo else ""
        prompts.append(Prompt(text, ids, sampling))
    return Job(prompts, options, bool(body.echo))


def _check_cost(
    services: Services,
    session: Session,
    options: GenerationOptions,
    sizes: list[tuple[int, int]],
    *,
    echo: bool,
) -> None:
    """sizes: tokens of each prompt, and those to generate. Charges what scoring the prompts for
    their echo will hold. Raises TooCostlyError, OverloadError."""
    bounds, top = services.bounds, options.sampling.logprobs
    prompts = sum(prompt for prompt, _ in sizes)
    generated = sum(room for _, room in sizes)
    tokens = (prompts + generated) * options.n
    bounds.check_passes("prompt", len(sizes) * options.n, tokens)
    told = (prompts if echo else 0) + (0 if options.stream else generated)
    size = generated_answer_bytes(told * options.n, top, COMPLETION_ALTERNATIVE_BYTES)
    bounds.check_answer("prompt" if top is None else "logprobs", size)
    if echo and top is not None:
        session.account.charge(scored_bytes(prompts, top), "logprobs")


def _prompts(given: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """One entry per prompt: all strings, or all lists of token ids. Raises RequestError."""
    if isinstance(given, str):
        return [given]
    texts = [item for item in given if isinstance(item, str)]
    token_ids = [item for item in given if isinstance(item, int)]
    lists = [item for item in given if isinstance(item, list)]
    if not given:
        raise RequestError("prompt is empty", "prompt")
    if len(token_ids) == len(given):
        return [token_ids]
    if len(texts) == len(given):
        return texts
    if len(lists) == len(given):
        return lists
    raise RequestError(
        "prompt: expected a string, strings, token ids, or lists of token ids, not a mixture",
        "prompt",
    )


async def _token_ids(
    services: Services, session: Session, listed: list[str] | list[list[int]]
) -> list[list[int]]:
    texts = [given for given in listed if isinstance(given, str)]
    if not all(texts):
        raise RequestError("prompt is empty", "prompt")
    if texts:
        for text in texts:
            services.bounds.check_text("prompt", len(text))
        most = services.model.max_context_tokens
        return await services.tokenizing.encode(
            texts,
            session.charge_tokens,
            param="prompt",
            characters=sum(map(len, texts)),
            max_tokens=most,
        )
    return [given for given in listed if isinstance(given, list)]


async def _echo_text(services: Services, given: str | list[int]) -> str:
    """A prompt of token ids comes back as all its text, special tokens included."""
    return given if isinstance(given, str) else await text_of(services, given)


class _Run:
    """A job at work: its deltas, as one answer or as a stream of chunks."""

    def __init__(self, services: Services, session: Session, job: Job) -> None:
        self._services = services
        self._session = session
        self._job = job
        self._usages: dict[int, Usage] = {}
        self._header = header("cmpl", "text_completion", services.model.name)

    async def answer(self) -> Json:
        wanted, tokenizer = self._job.options.sampling.logprobs, self._services.tokenizer
        choices = [
            Collected(
                None if wanted is None else CompletionLogprobs(tokenizer, wanted),
                self._session.account,
            )
            for _ in range(self._job.count)
        ]
        await collect(self._deltas(), choices)
        told = [
            json_object(
                {"index": index, "text": choice.text, "finish_reason": choice.finish_reason},
                {"logprobs": choice.logprobs},
            )
            for index, choice in enumerate(choices)
        ]
        head = {**self._header, "usage": self._usage()}
        return json_object(head, {"choices": json_list(told)})

    async def frames(self) -> AsyncGenerator[bytes, None]:
        usage = {"usage": None} if self._job.options.include_usage else {}
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                if delta.text or delta.tokens or delta.finish_reason:
                    choice = self._choice(index, delta.text, delta.tokens, delta.finish_reason)
                    yield sse({**self._header, "choices": [choice], **usage})
        if usage:
            yield sse({**self._header, "choices": [], "usage": self._usage()})
        yield DONE

    async def _deltas(self) -> Deltas:
        """Each choice's echo first, then what is generated, its tokens shifted behind the echo."""
        job = self._job
        if job.echo:
            numbers = range(len(job.prompts))
            echoes = await map_bounded(self._echo, numbers, CONCURRENT_ECHOES)
            for index in range(job.count):
                async for delta in echoes[job.prompt_of(index)].deltas():
                    yield index, delta
        if job.options.max_tokens == 0:
            return
        choices = [
            Choice(
                index=index,
                submit=self._submit(index),
                stops=job.options.stops,
                lists_eos=True,  # lm-eval takes the last one listed for the one that was generated
            )
            for index in range(job.count)
        ]
        generated = run_choices(self._services, self._session, choices, self._usages)
        async with aclosing(generated):
            async for index, delta in generated:
                yield index, self._shifted(index, delta)

    def _submit(self, index: int) -> Submit:
        options = self._job.options
        prompt = self._job.prompts[self._job.prompt_of(index)]
        return Submit(
            request_id=0,
            token_ids=prompt.token_ids,
            sampling=with_seed(prompt.sampling, index % options.n),
            priority=options.priority,
            eos_token_ids=list(self._services.model.eos_token_ids),
        )

    def _shifted(self, index: int, delta: Delta) -> Delta:
        if not self._job.echo:
            return delta
        shift = len(self._job.prompts[self._job.prompt_of(index)].text)
        tokens = [ShownToken(t.token_id, t.offset + shift, t.logprob) for t in delta.tokens]
        return msgspec.structs.replace(delta, tokens=tokens)

    async def _echo(self, number: int) -> Echo:
        """The echo of prompt `number`; its usage counts where nothing is generated after it."""
        options = self._job.options
        prompt = self._job.prompts[number]
        echoed = await echo(
            self._services, prompt.text, prompt.token_ids, options, patient=number > 0
        )
        if options.max_tokens == 0:
            self._session.on_token()
            self._session.on_sequence_end(echoed.usage, 0.0, 0.0)
            self._usages[number * options.n] = echoed.usage
        return echoed

    def _usage(self) -> dict[str, object]:
        tally = Tally()
        for index, usage in sorted(self._usages.items()):
            tally.add(self._job.prompt_of(index), usage)
        return tally.body()

    def _choice(
        self, index: int, text: str, tokens: list[ShownToken], finish_reason: str | None
    ) -> dict[str, Any]:
        wanted = self._job.options.sampling.logprobs
        logprobs = None
        if wanted is not None:
            logprobs = completion_logprobs(self._services.tokenizer, tokens, wanted)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
