"""Generation for both completion APIs: sequences, their merge, echo, whole and streamed answers.

An echoed prompt may be as long as the context, with many alternatives per token. Its tokens are
processed in slices, so that other requests can run in between.
"""

import array
import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.classification.classify import map_bounded
from cluster.http.body import read_prioritized_body
from cluster.http.request_context import AppState, RequestContext
from cluster.http.response_types import TokenUsage
from cluster.http.responses import (
    DONE,
    ChoiceBuilder,
    Deltas,
    EventStream,
    Json,
    LogprobsOf,
    json_list,
    json_object,
    pieces_response,
    response_fields,
    sse,
    token_usage,
)
from cluster.http.schemas import GenerationBody, GenerationOptions
from cluster.http.text import SLICE_TOKENS, Delta, SequenceText, ShownToken, mark_special
from contracts.clock import monotonic_s
from contracts.messages import Scored, Submit, TokenLogprob
from contracts.metrics import Pipeline
from contracts.requests import Sampling, Usage
from models.text.tokenizer import Tokenizer

CONCURRENT_SEQUENCES = 256  # per request
CONCURRENT_ECHOES = 64
_MERGE_BUFFER = 64  # deltas; then producers wait for the client

_Item = tuple[int, Delta]


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to return in front of each choice.

    scored: None without log-probabilities.
    offsets: where each token begins in the text.
    reason: the finish reason if nothing is generated.
    """

    text: str
    token_ids: list[int]
    offsets: Sequence[int] = ()
    scored: Scored | None = None
    reason: str | None = None

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        if self.scored is None:
            yield Delta(self.text, [], self.reason)
            return
        count = len(self.token_ids)
        for start in range(0, count, SLICE_TOKENS):
            end = start + SLICE_TOKENS
            if start:
                await asyncio.sleep(0)
            is_last = end >= count
            text_end = len(self.text) if is_last else self.offsets[end]
            text = self.text[self.offsets[start] if start else 0 : text_end]
            yield Delta(
                text, self._tokens(self.scored, start, end), self.reason if is_last else None
            )

    def _tokens(self, scored: Scored, start: int, end: int) -> list[ShownToken]:
        """Return tokens with log-probabilities, which the first token does not have."""
        values, tops = scored.token_logprobs or [], scored.token_tops
        tokens = []
        for index in range(start, min(end, len(self.token_ids))):
            logprob = None
            if index:
                top = [] if tops is None else tops[index - 1]
                logprob = TokenLogprob(values[index - 1], top)
            tokens.append(ShownToken(self.token_ids[index], self.offsets[index], logprob))
        return tokens


async def _offsets(tokenizer: Tokenizer, token_ids: list[int], text: str) -> Sequence[int]:
    """Return where in `text` each token of a prompt begins.

    Special tokens that the tokenizer added to the prompt are not in its text.
    """
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    offsets, offset = array.array("q"), 0
    for index, token_id in enumerate(token_ids):
        offsets.append(offset)
        special = tokenizer.special_texts.get(token_id)
        if special is None or text.startswith(special, offset):
            piece = detokenizer.push((token_id,))
            if not text.startswith(piece, offset):  # a space before the first word is not there
                piece = piece.removeprefix(" ")
            offset = min(offset + len(piece), len(text))
        if index % SLICE_TOKENS == SLICE_TOKENS - 1:
            await asyncio.sleep(0)
    return offsets


async def merge_sequences(
    deltas_of: Callable[[int], AsyncGenerator[_Item, None]], count: int
) -> AsyncGenerator[_Item, None]:
    """Yield the items of `deltas_of(0)` to `deltas_of(count - 1)` as they arrive.

    The first error ends all of them.
    """
    items: asyncio.Queue[_Item | Exception | None] = asyncio.Queue(_MERGE_BUFFER)

    async def run(index: int) -> None:
        async with aclosing(deltas_of(index)) as deltas:
            async for item in deltas:
                await items.put(item)

    async def run_all() -> None:
        end: Exception | None = None
        try:
            await map_bounded(run, range(count), CONCURRENT_SEQUENCES)
        except Exception as error:  # noqa: BLE001 - raised by the consumer
            end = error
        await items.put(end)

    producer = asyncio.ensure_future(run_all())
    try:
        while isinstance(item := await items.get(), tuple):
            yield item
        if item is not None:
            raise item
    finally:
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)


class GenerationPrompt(msgspec.Struct, frozen=True):
    """A prompt. text: returned by `echo`."""

    token_ids: list[int]
    sampling: Sampling
    text: str = ""


class ResponseFormatter(Protocol):
    """Form of one API's answers.

    prefix: of an answer's id.
    object_type, chunk_type: names of a whole answer and of a chunk.
    logprobs_of: returns the log-probabilities of tokens; None: not requested.
    """

    prefix: str
    object_type: str
    chunk_type: str
    logprobs_of: LogprobsOf | None

    def choice(self, index: int, choice: ChoiceBuilder) -> dict[str, Any]:
        """Return a choice of a whole answer, without log-probabilities."""

    def pieces(self, index: int, delta: Delta) -> Sequence[dict[str, Any]]:
        """Return the choices of the chunks of a delta."""


class GenerationJob(msgspec.Struct, frozen=True):
    """A checked request.

    lists_eos: the end-of-sequence token is listed among the tokens with log-probabilities.
    shows_tags: the formatter receives the tags of the model's answer format.
    """

    prompts: list[GenerationPrompt]
    options: GenerationOptions
    formatter: ResponseFormatter
    echo: bool = False
    lists_eos: bool = False
    shows_tags: bool = False

    @property
    def count(self) -> int:
        return len(self.prompts) * self.options.n

    @property
    def prefill_only(self) -> bool:
        """Return whether one pass over each prompt completes the request."""
        return self.options.max_tokens == 0 or all(
            prompt.sampling.max_tokens <= 1 for prompt in self.prompts
        )

    def prompt_of(self, index: int) -> int:
        """Return the prompt of a choice. Choices are ordered by prompt, then by repetition."""
        return index // self.options.n


Body = TypeVar("Body", bound=GenerationBody)
Check = Callable[[AppState, RequestContext, Body], Awaitable[GenerationJob]]


async def generation(
    app_state: AppState,
    ctx: RequestContext,
    request: Request,
    kind: type[Body],
    check: Check[Body],
) -> Response:
    """Run a generation request.

    check: returns the job of a body, or raises TandemError.
    """
    body = await read_prioritized_body(app_state, ctx, request, kind)

    async def respond() -> Response:
        job = await check(app_state, ctx, body)
        if job.prefill_only:
            ctx.pipeline = Pipeline.PREFILL
        run = _Run(app_state, ctx, job)
        if job.options.stream:
            return await EventStream.open(ctx, run.frames())
        return pieces_response(await run.answer())

    return await ctx.run(respond())


class _Run:
    """A running job: its deltas, as one answer or as a stream of chunks."""

    def __init__(self, app_state: AppState, ctx: RequestContext, job: GenerationJob) -> None:
        self._app_state = app_state
        self._ctx = ctx
        self._job = job
        self._formatter = job.formatter
        self._stops, self._markers = job.options.stops, dict[int, str]()
        if job.options.stops:
            tokenizer = app_state.tokenizer
            shown = tokenizer.tag_texts if job.shows_tags else {}
            hidden = {i: text for i, text in tokenizer.special_texts.items() if i not in shown}
            self._stops, self._markers = mark_special(job.options.stops, hidden)
        self._usages: dict[int, Usage] = {}

    def _header(self, kind: str) -> dict[str, Any]:
        return response_fields(self._formatter.prefix, kind, self._app_state.model.name)

    async def answer(self) -> Json:
        formatter, account = self._formatter, self._ctx.account
        choices = [ChoiceBuilder(formatter.logprobs_of, account) for _ in range(self._job.count)]
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                choices[index].add(delta)
        result = [
            json_object(formatter.choice(index, choice), {"logprobs": choice.logprobs})
            for index, choice in enumerate(choices)
        ]
        head = {**self._header(formatter.object_type), "usage": self._usage()}
        return json_object(head, {"choices": json_list(result)})

    async def frames(self) -> AsyncGenerator[bytes, None]:
        head, formatter = self._header(self._formatter.chunk_type), self._formatter
        options = self._job.options
        usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                if options.continuous_usage:
                    usage["usage"] = self._usage()
                for piece in formatter.pieces(index, delta):
                    yield sse({**head, "choices": [piece], **usage})
        if usage:
            yield sse({**head, "choices": [], "usage": self._usage()})
        yield DONE

    def _usage(self) -> TokenUsage:
        prompts: dict[int, Usage] = {}  # each counts once, however many choices it has
        for index, usage in sorted(self._usages.items()):
            prompts.setdefault(self._job.prompt_of(index), usage)
        generated = sum(usage.completion_tokens for usage in self._usages.values())
        return token_usage(prompts.values(), generated)

    def _deltas(self) -> Deltas:
        return self._echoed() if self._job.echo else self._generated()

    async def _echoed(self) -> Deltas:
        """Yield each choice's echo, then what is generated, with shifted offsets."""
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
        return self._sequence(0) if count == 1 else merge_sequences(self._sequence, count)

    async def _sequence(self, index: int) -> Deltas:
        """Yield one delta per arrival. The first sequence decides on admission."""
        app_state, ctx, submit = self._app_state, self._ctx, self._submit(index)
        text = SequenceText(
            app_state.tokenizer,
            prompt_ids=submit.token_ids,
            stops=self._stops,
            markers=self._markers,
            stops_after=submit.sampling.min_tokens if submit.sampling else 0,
            hidden_ids=submit.end_token_ids,
            lists_hidden=self._job.lists_eos,
            shows_tags=self._job.shows_tags,
        )
        first_s = last_s = 0.0
        async with aclosing(app_state.backend.generate(submit, wait_for_slot=index > 0)) as batches:
            async for batch in batches:
                ctx.on_token()
                last_s = monotonic_s()
                first_s = first_s or last_s
                delta = text.push(batch)
                if text.finished or self._job.options.continuous_usage:
                    self._usages[index] = text.usage
                if text.finished:
                    ctx.on_sequence_end(text.usage, first_s, last_s)
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
            priority=self._ctx.priority,
            eos_token_ids=list(self._app_state.model.eos_token_ids),
            caller=self._ctx.caller,
        )

    async def _echo(self, number: int) -> Echo:
        """Return the echo of prompt `number`. Its usage counts if nothing is generated."""
        options, prompt = self._job.options, self._job.prompts[number]
        token_ids, usage = prompt.token_ids, Usage(prompt_tokens=len(prompt.token_ids))
        scored: Scored | None = None
        offsets: Sequence[int] = ()
        reason = "length" if options.max_tokens == 0 else None
        if options.sampling.logprobs is not None:
            scored = await self._score(token_ids, number)
            offsets = await _offsets(self._app_state.tokenizer, token_ids, prompt.text)
            usage = scored.usage
        if reason:
            self._ctx.on_token()
            self._ctx.on_sequence_end(usage, 0.0, 0.0)
            self._usages[number * options.n] = usage
        return Echo(
            text=prompt.text, token_ids=token_ids, offsets=offsets, scored=scored, reason=reason
        )

    async def _score(self, token_ids: list[int], number: int) -> Scored:
        if len(token_ids) == 1:
            return Scored(0, Usage(prompt_tokens=1), token_logprobs=[])
        options = self._job.options
        submit = Submit(
            request_id=0,
            token_ids=token_ids,
            sampling=None,
            priority=self._ctx.priority,
            score_from=1,
            score_top=options.sampling.logprobs or 0,
            caller=self._ctx.caller,
        )
        return await self._app_state.backend.score(submit, wait_for_slot=number > 0)


def _shifted(delta: Delta, characters: int) -> Delta:
    tokens = [ShownToken(t.token_id, t.offset + characters, t.logprob) for t in delta.tokens]
    return msgspec.structs.replace(delta, tokens=tokens)


def _with_seed(sampling: Sampling, repetition: int) -> Sampling:
    """Return settings with the seed of a repetition: seed, seed + 1, ..."""
    if sampling.seed is None or repetition == 0:
        return sampling
    seed = (sampling.seed + repetition + (1 << 63)) % (1 << 64) - (1 << 63)
    return msgspec.structs.replace(sampling, seed=seed)
