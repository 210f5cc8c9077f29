"""Answers of the endpoints, as the OpenAPI document shows them.

Long parts of answers are built from pieces of JSON (`responses.py`); tests compare the two.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from contracts.ranks import RankStatus

FinishReason = Literal["stop", "length", "tool_calls"]
ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "rate_limit_error",
    "server_error",
]


class _Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Answer(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    created: int
    model: str


class PromptTokensDetails(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of the usage. cached_tokens: prompt tokens found in the prefix cache."""

    cached_tokens: int


class TokenUsage(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens that a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Four parallel lists. The first token of a prompt has no log-probability: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One text. finish_reason null: more follows (streaming only)."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(_Answer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunk(_Answer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event of a streamed completion.

    usage: with stream_options.include_usage, null until the last chunk, which has no choices.
    """

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage | UnsetType | None = UNSET


class TopLogprob(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A generated token and its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function with arguments as JSON text. In a stream, the name comes first."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of a tool. index: in a stream."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class AssistantMessage(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's message. content: null if there is only reasoning or calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None


class ChatChoice(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(_Answer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage


class ChatDelta(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The role in the first chunk of a choice, then pieces of its text."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of one message."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(_Answer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event of a streamed chat completion. usage: as in CompletionChunk."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET


class ClassifiedRow(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The classification of one text.

    label: with multi_label the list of those with a probability of at least 0.5.
    probs: in the order of the request's labels.
    """

    index: int
    label: str | list[str]
    probs: list[float]
    num_classes: int


class Classification(_Answer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer of /v1/classify: one row per text, in order."""

    object: Literal["list"]
    data: list[ClassifiedRow]
    usage: TokenUsage


class Scoring(_Answer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer of /v1/score: per item a score for each of label_token_ids."""

    object: Literal["scoring"]
    scores: list[list[float]]
    usage: TokenUsage


class ModelCard(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A served model.

    max_model_len: tokens of prompt and answer together.
    expert_execution: whether experts are those that routers choose, or predicted ones.
    colocated: whether each rank that generates has all weights. colocated_gain: the planner's
    prediction of how many times faster that generates one sequence; null without planner.hardware.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    expert_execution: Literal["exact", "speculated"]
    colocated: bool
    colocated_gain: float | None


class ModelList(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The served models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class Version(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The version of the server."""

    version: str


class PipelineLoad(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests under way, and their sequences that wait for a first answer, by class."""

    requests: int
    waiting: dict[str, int]


class ServerLoad(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Running and waiting requests. server_load: all requests under way."""

    server_load: int
    pipelines: dict[str, PipelineLoad]


class Status(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of the server.

    problems: reasons why it is not ready or the status is incomplete; empty: ready.
    ranks: the state that each rank reports, without the planner.
    """

    model: str
    version: str
    problems: list[str]
    pipelines: dict[str, PipelineLoad]
    ranks: list[RankStatus]


class Health(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every rank serves."""

    status: Literal["ok"]


class ErrorDetail(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error. param: the field that it concerns, or null."""

    message: str
    type: ErrorType
    param: str | None
    code: str


class ErrorResponse(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of every 4xx and 5xx answer."""

    error: ErrorDetail


class Tokenized(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokens of a text, or of a conversation as the chat template renders it."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text of tokens, including special ones."""

    prompt: str
