"""`POST /v1/chat/completions`, `POST /tokenize` and `POST /detokenize`.

The last two are vLLM's: the tokens of a text or conversation, and the text of tokens. They need no
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.http.body import (
    check_model,
    check_options,
    check_supported,
    check_tokens,
    read_request_body,
    resolve_max_tokens,
)
from cluster.http.cost import (
    CHAT_ALTERNATIVE_BYTES,
    MemoryAccount,
    decoded_bytes,
    generated_answer_bytes,
)
from cluster.http.errors import UnsupportedFieldError
from cluster.http.generation import GenerationJob, GenerationPrompt, generation
from cluster.http.request_context import AppState, RequestContext, fresh_id
from cluster.http.response_types import Detokenized, Tokenized
from cluster.http.responses import ChoiceBuilder, LogprobsOf, chat_logprobs, json_response
from cluster.http.schemas import (
    TEMPLATE_FIELDS,
    ChatBody,
    ChatMessage,
    DetokenizeBody,
    GenerationOptions,
    TokenizeBody,
    Tool,
)
from cluster.http.structured_output import check_ends, forced_call, requested_tools, samplings
from cluster.http.text import Delta, ShownToken, decode_text
from contracts.errors import RequestError, TooLongError
from contracts.requests import INT64
from models.text.answer_format import AnswerParser, AnswerPiece, open_tag

CALL_ID_CHARACTERS = 9  # Mistral's templates accept no others
PROMPT_END_TOKENS = 16  # that show whether the answer begins inside a tag
_NO_TEMPLATES = frozenset({"refusal", "annotations", "audio", "function_call", "tool_calls"})
_RESERVED = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


async def chat_completions(app_state: AppState, ctx: RequestContext, request: Request) -> Response:
    return await generation(app_state, ctx, request, ChatBody, _job)


async def _job(app_state: AppState, ctx: RequestContext, body: ChatBody) -> GenerationJob:
    check_supported(body)
    if body.echo:
        raise UnsupportedFieldError("echo is not supported for chat", "echo")
    check_model(body.model, app_state.model)
    if body.top_logprobs and not body.logprobs:  # vLLM's default is 0
        raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    options = check_options(body, app_state.model, logprobs=top)
    if options.n > app_state.http.max_batch_items:
        raise RequestError(f"n={options.n} is more than http.max_batch_items", "n")
    tools = requested_tools(body, app_state.tokenizer)
    forced = forced_call(body, tools)
    if forced is not None:
        if options.structure is not None:
            field = options.structure.field
            raise RequestError(f"{field} and a forced tool_choice: one is enough", field)
        check_ends(options.sampling, forced.structure)
        options = msgspec.structs.replace(options, structure=forced.structure)
    variables = template_variables(body)
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if tools:
        variables["tools"] = [_plain_tool(tool) for tool in tools]
    token_ids = await chat_token_ids(
        *(app_state, ctx, body.messages, variables),
        add_special_tokens=bool(body.add_special_tokens),
    )
    check_tokens(token_ids, app_state.model, "messages")
    room = resolve_max_tokens(
        *(len(token_ids), options, app_state),
        default=_default_max_tokens(app_state, options, len(token_ids)),
        param="messages",
    )
    tokens = options.n * (len(token_ids) + room)
    app_state.bounds.check_passes("n", options.n, tokens)
    if not options.stream:
        answered = generated_answer_bytes(options.n * room, top, CHAT_ALTERNATIVE_BYTES)
        app_state.bounds.check_answer("max_tokens", answered)
    prompt_end = app_state.tokenizer.decode(token_ids[-PROMPT_END_TOKENS:], False)
    first_part = _text(body.messages[-1]) if body.continue_final_message else ""
    if first_part and app_state.tokenizer.answer_format.thinks:
        prompt_end = open_tag(first_part)
    form, structure = app_state.tokenizer.answer_format, options.structure
    if forced is None and structure is not None and structure.kind != "choice":
        before = form.reasoning(prompt_end, app_state.tokenizer.tag_ids)
        structure = msgspec.structs.replace(structure, before=before)
        options = msgspec.structs.replace(options, structure=structure)
    (sampling,) = await samplings(app_state, ctx, [(token_ids, room)], options)
    new_parser = forced.new_parser if forced else None
    if structure is None or structure.before:  # else the whole answer is content or a call
        called = tools if structure is None else []
        schemas = {tool.function.name: tool.function.parameters or {} for tool in called}
        new_parser = form.new_parser(prompt_end, schemas, continues=bool(first_part))
    new_fields = partial(AnswerFields, new_parser, body.parallel_tool_calls is not False)
    logprobs_of = None if top is None else partial(chat_logprobs, app_state.tokenizer)
    formatter = _ChatFormatter(new_fields, logprobs_of)
    prompts = [GenerationPrompt(token_ids, sampling)]
    return GenerationJob(prompts, options, formatter, shows_tags=new_parser is not None)


def _default_max_tokens(app_state: AppState, options: GenerationOptions, prompt_tokens: int) -> int:
    """Return as many tokens per choice as the context and the limits allow."""
    limits = app_state.bounds.limits
    model = app_state.model
    most = min(model.max_context_tokens, limits.pass_tokens // options.n - prompt_tokens)
    most = min(most, model.sampling.max_tokens or most)
    if not options.stream:
        each = generated_answer_bytes(options.n, options.sampling.logprobs, CHAT_ALTERNATIVE_BYTES)
        most = min(most, limits.answer_bytes // each)
    return max(most, 1)


async def chat_token_ids(
    app_state: AppState,
    ctx: RequestContext,
    messages: list[ChatMessage],
    variables: dict[str, Any],
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """Apply the chat template and tokenize. Raises RequestError about `messages`."""
    context = app_state.model.max_context_tokens
    if len(messages) > context:
        raise TooLongError(
            f"messages: {len(messages)} are more than the model's context has tokens ({context}):"
            " send fewer",
            "messages",
        )
    plain = [
        _template_message(index, message, ctx.account) for index, message in enumerate(messages)
    ]
    steps = app_state.tokenizer.chat_steps(
        plain,
        variables,
        max_characters=app_state.bounds.prompt_characters,
        max_tokens=context,
        add_special_tokens=add_special_tokens,
    )
    return await app_state.tokenizer_pool.run(
        steps, ctx.account.held_bytes, ctx.charge_tokens, ctx.priority
    )


def _template_message(index: int, message: ChatMessage, account: MemoryAccount) -> dict[str, Any]:
    """Return the message for a template, without null fields."""
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise UnsupportedFieldError(
                f"messages[{index}].{name} is not supported", f"messages[{index}].{name}"
            )
    plain: dict[str, Any] = {
        key: value
        for key, value in msgspec.structs.asdict(message).items()
        if value is not None and key not in _NO_TEMPLATES
    }
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise RequestError(
                    f"messages[{index}]: a part of type {part.type!r} is not supported, only text",
                    "messages",
                )
        parts = [{"type": "text", "text": part.text} for part in message.content]
        plain["content"] = parts if any(part["text"] for part in parts) else ""
    if message.role == "assistant":
        plain.setdefault("content", "")  # an answer may have only calls or reasoning
    reasoning = message.reasoning_content or message.reasoning or message.thinking
    if reasoning:  # templates differ in its name
        plain |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
        if message.tool_calls and plain.get("content"):
            del plain["thinking"]  # the template of gpt-oss refuses both
    if "content" not in plain:
        raise RequestError(f"messages[{index}] has no content", "messages")
    if message.tool_calls:
        place = f"messages[{index}].tool_calls"
        calls = message.tool_calls
        plain["tool_calls"] = [_template_tool_call(place, call, account) for call in calls]
    return plain


def _plain_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as the client wrote it."""
    function = {
        key: value
        for key, value in msgspec.structs.asdict(tool.function).items()
        if value is not None
    }
    return {"type": tool.type, "function": function}


class _JsonArguments(dict[str, Any]):
    """Arguments of a tool call for a template: a mapping, and where text is expected their JSON."""

    def __init__(self, text: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _template_tool_call(place: str, call: dict[str, Any], account: MemoryAccount) -> dict[str, Any]:
    """Return a tool call for a template, which may walk through the arguments or print them."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place}: expected an object with function.name", "messages")
    text = function.get("arguments")
    if not isinstance(text, str):
        return call
    account.charge(decoded_bytes(text.encode("utf-8", "replace")))
    try:
        values = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        values = None
    if not isinstance(values, dict):  # a model's mistake: shown as it was written
        return call
    return {**call, "function": {**function, "arguments": _JsonArguments(text, values)}}


def _text(message: ChatMessage) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content)


def template_variables(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Return the variables of the chat template. Raises RequestError for a reserved name."""
    given = body.chat_template_kwargs or {}
    reserved = sorted(_RESERVED & given.keys())
    if reserved:
        raise RequestError(
            f"chat_template_kwargs: {reserved[0]} cannot be set", "chat_template_kwargs"
        )
    prompts = body.add_generation_prompt is not False
    if body.continue_final_message and prompts:
        raise RequestError(
            "continue_final_message needs add_generation_prompt=false", "continue_final_message"
        )
    continued = {"continue_final_message": True} if body.continue_final_message else {}
    return {**given, "add_generation_prompt": prompts, **continued}


class _ChatFormatter:
    """Format of chat completions. The first chunk of a choice holds the role."""

    prefix, object_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, new_fields: Callable[[], AnswerFields], logprobs_of: LogprobsOf | None
    ) -> None:
        self.logprobs_of = logprobs_of
        self._new_fields = new_fields
        self._started: dict[int, AnswerFields] = {}

    def choice(self, index: int, choice: ChoiceBuilder) -> dict[str, Any]:
        fields = self._new_fields()
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        calls: list[dict[str, Any]] = []
        for delta in fields.deltas(choice.text, is_last=True):
            for call in delta.pop("tool_calls", ()):
                if "id" in call:
                    calls.append({name: call[name] for name in ("id", "type", "function")})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            for name, text in delta.items():
                message[name] = (message.get(name) or "") + text
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None and "reasoning_content" not in message:
            message["content"] = ""
        reason = fields.finish_reason(choice.finish_reason)
        return {"index": index, "message": message, "finish_reason": reason}

    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        pieces = []
        if index not in self._started:
            self._started[index] = self._new_fields()
            pieces.append(self._piece(index, {"role": "assistant", "content": ""}, [], None))
        fields, reason = self._started[index], delta.finish_reason
        deltas = fields.deltas(delta.text, is_last=reason is not None)
        if not deltas and (delta.tokens or reason):
            deltas = [{}]
        for number, each in enumerate(deltas, start=1):
            tokens = delta.tokens if number == 1 else []
            ending = fields.finish_reason(reason) if number == len(deltas) else None
            pieces.append(self._piece(index, each, tokens, ending))
        return pieces

    def _piece(
        self, index: int, delta: dict[str, Any], tokens: list[ShownToken], reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self.logprobs_of(tokens) if tokens and self.logprobs_of else None,
            "finish_reason": reason,
        }


class AnswerFields:
    """Fields of one choice's message: content, reasoning_content and tool_calls.

    new_parser: None if all text is content. parallel_calls: False drops calls after the first.
    """

    def __init__(self, new_parser: Callable[[], AnswerParser] | None, parallel_calls: bool) -> None:
        self._parser = new_parser() if new_parser else None
        self._most_calls = INT64 if parallel_calls else 1
        self._calls = 0

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self._calls and reason == "stop" else reason

    def deltas(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """Return the additions that `text` makes, as OpenAI's deltas."""
        if self._parser is None:
            return [{"content": text}] if text else []
        pieces = self._parser.push(text)
        if is_last:
            pieces += self._parser.flush()
        return [delta for piece in pieces if (delta := self._delta(piece))]

    def _delta(self, piece: AnswerPiece) -> dict[str, Any]:
        if piece.field == "content":
            return {"content": piece.text}
        if piece.field == "reasoning":
            return {"reasoning_content": piece.text}
        self._calls += piece.name is not None
        if self._calls > self._most_calls:
            return {}
        call: dict[str, Any] = {"index": self._calls - 1}
        function = {"arguments": piece.text}
        if piece.name is not None:
            call |= {"id": fresh_id()[:CALL_ID_CHARACTERS], "type": "function"}
            function = {"name": piece.name, **function}
        return {"tool_calls": [{**call, "function": function}]}


async def tokenize(app_state: AppState, ctx: RequestContext, request: Request) -> Response:
    ctx.exclude_from_metrics()
    body = await read_request_body(app_state, ctx, request, TokenizeBody)
    token_ids = await ctx.run(_token_ids(app_state, ctx, body))
    text = app_state.tokenizer.token_text
    answer = Tokenized(
        count=len(token_ids),
        max_model_len=app_state.model.max_context_tokens,
        tokens=token_ids,
        token_strs=[text(each) for each in token_ids] if body.return_token_strs else None,
    )
    return json_response(answer)


async def detokenize(app_state: AppState, ctx: RequestContext, request: Request) -> Response:
    ctx.exclude_from_metrics()
    body = await read_request_body(app_state, ctx, request, DetokenizeBody)
    check_model(body.model, app_state.model)
    context = app_state.model.max_context_tokens
    if len(body.tokens) > context:
        raise TooLongError(
            f"tokens: {len(body.tokens)} are more than the {context} that the model's context"
            " holds: send them in parts",
            "tokens",
        )
    if body.tokens:
        check_tokens(body.tokens, app_state.model, "tokens")
    return json_response(
        Detokenized(prompt=await ctx.run(decode_text(app_state.tokenizer, body.tokens)))
    )


async def _token_ids(app_state: AppState, ctx: RequestContext, body: TokenizeBody) -> list[int]:
    check_model(body.model, app_state.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt or messages: give one of them", "prompt")
    if body.messages is not None:
        return await chat_token_ids(
            app_state,
            ctx,
            body.messages,
            template_variables(body),
            add_special_tokens=bool(body.add_special_tokens),
        )
    if any(getattr(body, field) is not None for field in TEMPLATE_FIELDS):
        raise UnsupportedFieldError(f"{', '.join(TEMPLATE_FIELDS)} are for messages", "messages")
    assert body.prompt is not None
    app_state.bounds.check_text("prompt", len(body.prompt))
    steps = app_state.tokenizer.encode_steps(
        [body.prompt],
        param="prompt",
        max_tokens=app_state.model.max_context_tokens,
        add_special_tokens=body.add_special_tokens is not False,
    )
    (token_ids,) = await app_state.tokenizer_pool.run(
        steps, len(body.prompt), ctx.charge_tokens, ctx.priority
    )
    return token_ids
