"""Request bodies: from bytes to checked values.

Checks run in this order: API key, size, media type, JSON, types and bounds (`schemas.py`),
unsupported fields, model, combinations of fields, then the prompt: tokens, vocabulary, context.
The first failure is reported. No rank receives anything before all checks pass.
"""

import asyncio
import codecs
import contextlib
import difflib
import gc
import logging
import operator
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from cluster.http.authenticator import with_cache_salt
from cluster.http.batch_types import BatchBody
from cluster.http.cost import MemoryAccount, decoded_bytes
from cluster.http.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    MediaTypeError,
    UnknownFieldError,
    UnsupportedFieldError,
)
from cluster.http.request_context import AppState, RequestContext
from cluster.http.schemas import (
    NESTED,
    NEUTRAL,
    ChatBody,
    ClassifyBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    GenerationOptions,
    ModelInfo,
    PrioritizedFields,
    ScoreBody,
    TokenizeBody,
    UnsupportedFields,
)
from cluster.http.structured_output import check_ends, requested_structure
from contracts.errors import ClientGoneError, RequestError, TooLongError, UnknownModelError
from contracts.json_input import wrong_field
from contracts.logs import event
from contracts.requests import Priority, Sampling, check_sampling
from contracts.scaling import ScaleTarget

Body = TypeVar("Body", bound=msgspec.Struct)
Prioritized = TypeVar("Prioritized", bound=PrioritizedFields)
Value = TypeVar("Value")

log = logging.getLogger("tandem.prompts")

MAX_SHOWN_CHARACTERS = 64
MAX_LOGGED_BYTES = 16 << 10
_KINDS = (
    BatchBody,
    ChatBody,
    ClassifyBody,
    CompletionBody,
    DetokenizeBody,
    ScaleTarget,
    ScoreBody,
    TokenizeBody,
)
# Built at import: msgspec crashes if two threads build the first decoder of a type at once.
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in _KINDS
}
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?([^`]*)`)?", re.DOTALL)
_BOUND = re.compile(r"Expected `\w+`( of length)? (>=|<=|>) (\S+)")
_PATTERN = re.compile(r"Expected `str` matching regex '([^']*)' - at `key`")
# A browser asks before it sends one of these to another site; none: see `admin.start_scale`.
_JSON_TYPE = re.compile(r"(application/([\w.-]+\+)?json|text/json)?", re.IGNORECASE)
_GOT_FLOAT = re.compile(r"Expected `int.*, got `float` - at `\$\.\w+`$")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_COMPARISONS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    ">=": (operator.ge, "at least"),
    "<=": (operator.le, "at most"),
    ">": (operator.gt, "above"),
}
_DEFAULTS = Sampling()
TIERS = {"flex": Priority.BE, "priority": Priority.LS}  # others are the default class


# ---- reading


async def read_request_body(
    app_state: AppState, ctx: RequestContext, request: Request, kind: type[Body]
) -> Body:
    """Return the request's body, charged to the request's account. Enforces the body timeout."""
    limit = app_state.http.max_body_bytes
    logged_id = ctx.request_id if app_state.config.log.prompts else None
    return await ctx.read(_read_body(request, kind, limit, ctx.account, logged_id))


async def read_small_body(
    app_state: AppState, request: Request, kind: type[Body], max_bytes: int
) -> Body:
    """Return the body of a request that is not served by ranks. Enforces the body timeout."""
    account, limit_s = app_state.memory_budget.open(), app_state.http.body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await _read_body(request, kind, max_bytes, account)
    except TimeoutError:
        raise BodyTimeoutError(f"the body did not arrive within {limit_s:g} s") from None
    finally:
        account.close()


async def read_prioritized_body(
    app_state: AppState, ctx: RequestContext, request: Request, kind: type[Prioritized]
) -> Prioritized:
    """Return the request's body and apply its priority class and cache salt to `ctx`."""
    body = await read_request_body(app_state, ctx, request, kind)
    ctx.set_priority(check_priority(body, default=ctx.priority))
    ctx.caller = with_cache_salt(ctx.caller, body.cache_salt)
    return body


async def _read_body(
    request: Request,
    kind: type[Body],
    max_bytes: int,
    account: MemoryAccount,
    logged_id: str | None = None,
) -> Body:
    """Read and decode the body as `kind`. Raises RequestError; `param` names the field.

    account: charged as the body grows; what the decoded body holds stays charged.
    logged_id: the request's id, if its body is logged.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(int(declared), max_bytes)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if not _JSON_TYPE.fullmatch(media_type):
        raise MediaTypeError(f"content-type: expected application/json, got {media_type}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise MediaTypeError(f"content-encoding: {coding} is not supported: send it uncompressed")
    data = bytearray()
    try:
        async for chunk in request.stream():
            if len(data) + len(chunk) > max_bytes:
                raise _too_large(len(data) + len(chunk), max_bytes)
            account.charge(len(chunk))
            data += chunk
    except ClientDisconnect:
        raise ClientGoneError("the client disconnected while sending its request") from None
    if logged_id is not None:
        text = data[:MAX_LOGGED_BYTES].decode("utf-8", "replace")
        event(log, "request_body", request_id=logged_id, bytes=len(data), body=text)
    account.charge(decoded_bytes(data))
    body = decode_body(data, kind)
    account.release(len(data))
    return body


def decode_body(data: bytes | bytearray, kind: type[Body]) -> Body:
    """Decode `data`, with or without a byte order mark, as `kind`. Raises RequestError."""
    if data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
    collects = gc.isenabled()
    gc.disable()  # all decoded objects survive: collections during the decoding dominate its time
    try:
        body: Body = _decode_fields(data, kind)
        return body
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    finally:
        if collects:
            gc.enable()


def _decode_fields(data: bytes | bytearray, kind: type[Body]) -> Any:
    try:
        return _DECODERS[kind].decode(data)
    except msgspec.ValidationError as error:
        problem = str(error)
    if _GOT_FLOAT.search(problem):  # accept n: 1.0, as pydantic does
        fields = msgspec.json.decode(data)
        whole = {k: int(v) for k, v in fields.items() if isinstance(v, float) and v == v // 1}
        try:
            return msgspec.convert({**fields, **whole}, kind)
        except msgspec.ValidationError as error:
            problem = str(error)
    raise _field_error(problem, data, kind)


def _too_large(got_bytes: int, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {got_bytes} bytes, at most {max_bytes} are accepted (http.max_body_bytes)"
    )


# ---- msgspec's errors as answers


def _field_error(message: str, data: bytes | bytearray, kind: type[msgspec.Struct]) -> RequestError:
    """Translate "Expected `int` >= 1 - at `$.n`" into an error that names field, value, bound."""
    unknown = _UNKNOWN.fullmatch(message)
    if unknown:
        return _unknown_field(unknown[1], unknown[2] or "", kind)
    path, text = wrong_field(message)
    field = re.split(r"[.\[]", path)[0]
    bound, pattern = _BOUND.match(message), _PATTERN.match(message)
    with contextlib.suppress(AttributeError, LookupError, StopIteration, TypeError):  # repeated key
        if bound:
            return RequestError(_bound_text(path, data, *bound.groups()), field)
        if pattern:
            wrong = next(key for key in _value_at(data, path) if not re.search(pattern[1], key))
            return RequestError(f"{path}: key {_shown(wrong)} does not match {pattern[1]}", field)
    return RequestError(f"{path}: {text}" if path else text, path or None)


def _bound_text(
    path: str, data: bytes | bytearray, is_length: str | None, sign: str, bound: str
) -> str:
    holds, words = _COMPARISONS[sign]
    bound = bound.removesuffix(".0")
    is_entry = path.endswith("[...]")  # msgspec does not say which key
    path = path.removesuffix("[...]")
    value = _value_at(data, path)
    if is_entry:
        key = next(key for key, each in value.items() if not holds(each, float(bound)))
        path, value = f"{path}[{key!r}]", value[key]
    if not is_length:
        return f"{path}={_shown(value)} must be {words} {bound}"
    if not value:
        return f"{path} is empty"
    unit = "characters" if isinstance(value, str) else "entries"
    return f"{path} has {len(value)} {unit}, {words} {bound} are accepted"


def _value_at(data: bytes | bytearray, path: str) -> Any:
    value = msgspec.json.decode(data)
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def _unknown_field(name: str, path: str, kind: type[msgspec.Struct]) -> RequestError:
    """Return an error that suggests the nearest field of the object at `path`."""
    shown = name if name.isprintable() else repr(name)[1:-1]
    if len(shown) > MAX_SHOWN_CHARACTERS:
        shown = f"{shown[:MAX_SHOWN_CHARACTERS]}..."
    param = f"{path}.{shown}" if path else shown
    inner = path.rpartition(".")[2].partition("[")[0]
    known = [field.encode_name for field in msgspec.structs.fields(NESTED.get(inner, kind))]
    matches = difflib.get_close_matches(shown, known, n=1)
    hint = f": did you mean {matches[0]}?" if matches else "; it would have no effect: leave it out"
    return UnknownFieldError(f"{param} is not a field of this request{hint}", param)


# ---- values and combinations of fields


def check_supported(body: UnsupportedFields) -> None:
    """Raise UnsupportedFieldError for the first unsupported field that would have an effect."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and not any(_same(value, accepted) for accepted in neutral):
            raise UnsupportedFieldError(f"{name} is not supported", name)


def _same(value: object, other: object) -> bool:
    """Compare as JSON: 0 equals 0.0, but not false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def check_model(name: str | None, model: ModelInfo) -> None:
    """Raise UnknownModelError unless `name` is the served model's or absent."""
    if name is not None and name != model.name:
        raise UnknownModelError(f"model {name!r} is not served; this is {model.name!r}", "model")


def check_priority(body: PrioritizedFields, *, default: Priority) -> Priority:
    """Return the priority class of `priority`, else of `service_tier`, else `default`.

    `priority` is "ls", "be" or, as in vLLM, an integer: 0 is ls, greater is be.
    """
    value = body.priority
    if value is None:
        return TIERS.get(body.service_tier or "", default)
    if isinstance(value, str):
        by_label = {priority.label: priority for priority in Priority}
        if value not in by_label:
            raise RequestError(f"priority={value!r}: expected ls or be", "priority")
        return by_label[value]
    return Priority.BE if value > 0 else Priority.LS


def check_options(
    body: GenerationBody, model: ModelInfo, *, logprobs: int | None
) -> GenerationOptions:
    """Return the common fields of a generation with defaults filled in. Raises RequestError."""
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise UnsupportedFieldError(
            f"best_of={body.best_of} is not supported (n is {n})", "best_of"
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream=true", "stream_options")
    options = body.stream_options
    sampling = _sampling(body, logprobs, model)
    structure = requested_structure(body)
    check_ends(sampling, structure)
    return GenerationOptions(
        sampling=sampling,
        max_tokens=_or_default(body.max_completion_tokens, body.max_tokens),
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        structure=structure,
        n=n,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
    )


def _sampling(body: GenerationBody, logprobs: int | None, model: ModelInfo) -> Sampling:
    default = model.sampling
    biases = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    sampling = Sampling(
        temperature=_or_default(body.temperature, default.temperature),
        top_p=_or_default(body.top_p, default.top_p),
        min_p=_or_default(body.min_p, default.min_p),
        seed=body.seed,
        presence_penalty=_or_default(body.presence_penalty, _DEFAULTS.presence_penalty),
        frequency_penalty=_or_default(body.frequency_penalty, _DEFAULTS.frequency_penalty),
        repetition_penalty=_or_default(body.repetition_penalty, default.repetition_penalty),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=_or_default(body.stop_token_ids, []),
        min_tokens=_or_default(body.min_tokens, _DEFAULTS.min_tokens),
        top_k=max(_or_default(body.top_k, default.top_k), 0),  # vLLM's -1 is our 0: no limit
        logit_bias=biases or None,
        logprobs=logprobs,
    )
    check_sampling(sampling, model.vocab_size)
    return sampling


def _or_default(value: Value | None, default: Value) -> Value:
    return default if value is None else value


# ---- the prompt


def check_tokens(token_ids: list[int], model: ModelInfo, param: str) -> None:
    """Raise RequestError if a prompt is empty or has ids outside the vocabulary."""
    if not token_ids:
        raise RequestError(f"{param} is empty", param)
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= model.vocab_size:
        bad = low if low < 0 else high
        raise RequestError(
            f"{param}: token id {bad} is outside the vocabulary (0 to {model.vocab_size - 1})",
            param,
        )


def resolve_max_tokens(
    prompt_tokens: int, options: GenerationOptions, app_state: AppState, *, default: int, param: str
) -> int:
    """Return max_tokens for this prompt.

    A requested value must fit behind the prompt (400 otherwise); the default is reduced to what
    fits. A prompt that leaves no room for a token is rejected (413). A rank's KV pool may hold less
    than the context.
    """
    capacity, holder = app_state.model.max_context_tokens, "the model's context"
    is_prefill = options.max_tokens is not None and options.max_tokens <= 1
    pool_tokens = app_state.backend.pool_tokens(prefill=is_prefill)
    if pool_tokens is not None and pool_tokens < capacity:
        capacity, holder = pool_tokens, "a rank's KV pool (kv.pool_tokens)"
    room = capacity - prompt_tokens
    needed = 0 if options.max_tokens == 0 else 1
    if room < needed:
        raise TooLongError(
            f"{param} has {prompt_tokens} tokens, {holder} holds {capacity}"
            f" including at least {needed} to generate: shorten it",
            param,
        )
    if options.max_tokens is None:
        return min(default, room)
    if options.max_tokens > room:
        raise RequestError(
            f"max_tokens={options.max_tokens} and {prompt_tokens} prompt tokens are more than the"
            f" {capacity} tokens that {holder} holds: request at most {room}",
            "max_tokens",
        )
    return options.max_tokens
