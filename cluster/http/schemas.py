"""Request bodies, as msgspec decodes them. A field that nobody knows is refused by name, with the
nearest one that is known (`body.py`); fields that are known but not supported are declared, so that
values which change nothing can be let through."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from cluster.classification.classify import MAX_LABELS
from cluster.http import field_bounds as bounds
from cluster.http.field_bounds import described, shown, unsupported
from contracts.requests import Priority, Sampling


class StrictFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Other fields than those declared are refused."""


class IgnoredFields(StrictFields, kw_only=True):
    """Accepted and ignored, whatever they hold: what OpenAI's clients send about a request (for
    whom it is, what to keep of it, how to bill and cache it) and that does not change its answer.
    """

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None  # there are no tools to call
    request_id: Any = None  # vLLM's; the header X-Request-Id names a request here


class PrioritizedFields(IgnoredFields, kw_only=True):
    """Of a request that runs as LS or BE."""

    priority: bounds.RequestPriority = None
    service_tier: bounds.ServiceTier = None


class UnsupportedFields(PrioritizedFields, kw_only=True):
    allowed_token_ids: Annotated[Any, unsupported()] = None
    audio: Annotated[Any, unsupported()] = None
    bad_words: Annotated[Any, unsupported([])] = None
    continue_final_message: Annotated[Any, unsupported(False)] = None
    function_call: Annotated[Any, unsupported("none", "auto")] = None
    functions: Annotated[Any, unsupported([])] = None
    guided_grammar: Annotated[Any, unsupported()] = None
    guided_json: Annotated[Any, unsupported()] = None
    guided_regex: Annotated[Any, unsupported()] = None
    include_stop_str_in_output: Annotated[Any, unsupported(False)] = None
    modalities: Annotated[Any, unsupported(["text"])] = None
    prediction: Annotated[Any, unsupported()] = None
    prompt_logprobs: Annotated[Any, unsupported()] = None
    response_format: Annotated[Any, unsupported({"type": "text"})] = None
    skip_special_tokens: Annotated[Any, unsupported(True)] = None
    suffix: Annotated[Any, unsupported("")] = None
    tool_choice: Annotated[Any, unsupported("none", "auto")] = None
    tools: Annotated[Any, unsupported([])] = None
    truncate_prompt_tokens: Annotated[Any, unsupported()] = None
    use_beam_search: Annotated[Any, unsupported(False)] = None
    web_search_options: Annotated[Any, unsupported()] = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    field.name: get_args(field.type)[1].extra["neutral"]
    for field in msgspec.structs.fields(UnsupportedFields)
    if get_origin(field.type) is Annotated and "neutral" in (get_args(field.type)[1].extra or ())
}


class StreamOptions(StrictFields, kw_only=True):
    """include_obfuscation: OpenAI pads its chunks with it against listeners; ignored."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class StructuredOutputs(StrictFields, kw_only=True):
    """vLLM's name for guided decoding, of which choice is supported."""

    choice: bounds.Choices | None = None
    grammar: bounds.Unused = None
    json: bounds.Unused = None
    json_object: bounds.Unused = None
    regex: bounds.Unused = None
    structural_tag: bounds.Unused = None


class GenerationBody(UnsupportedFields, kw_only=True):
    """What completions and chat completions have in common."""

    model: str
    max_tokens: int | None = None
    temperature: bounds.Temperature = None
    top_p: bounds.TopP = None
    top_k: bounds.TopK = None
    min_p: bounds.MinP = None
    seed: bounds.Seed = None
    presence_penalty: bounds.Penalty = None
    frequency_penalty: bounds.Penalty = None
    repetition_penalty: bounds.RepetitionPenalty = None
    logit_bias: bounds.LogitBias = None
    stop: bounds.Stop = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    guided_choice: bounds.GuidedChoice = None
    structured_outputs: StructuredOutputs | None = None
    n: int | None = None
    best_of: bounds.BestOf = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: bounds.CacheSalt = None


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[bounds.Logprobs, described("Alternatives per token.")] = None
    echo: bool | None = None


class ContentPart(StrictFields, kw_only=True):
    type: Annotated[str, shown(const="text")]
    text: str | None = None
    image_url: Any = None  # parts of other types are refused by that
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class ChatMessage(StrictFields, kw_only=True):
    """Of refusal, annotations, audio and function_call only null is of use: a client that sends an
    answer back as it came sends them too. They go to no template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[
        bounds.Logprobs, described("Alternatives per token; needs logprobs.")
    ] = None
    echo: Annotated[bool | None, shown(enum=[None, False])] = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# By the field in whose value they stand.
NESTED: dict[str, type[msgspec.Struct]] = {
    "stream_options": StreamOptions,
    "structured_outputs": StructuredOutputs,
    "messages": ChatMessage,
    "content": ContentPart,
}


class ClassifyBody(PrioritizedFields, kw_only=True):
    model: str
    input: str | list[str]
    labels: Annotated[
        list[Annotated[str, shown(pattern=r"\S")]],
        shown(minItems=1, maxItems=MAX_LABELS, uniqueItems=True),
    ]
    prefix: str | None = None
    multi_label: Annotated[
        bool | None, described("Each label by itself: yes or no? Needs a template with {label}.")
    ] = None
    template: Annotated[
        Annotated[str, shown(pattern=r"\{text\}")] | None,
        described(
            "{text}, {prefix}, with multi_label {label}, are filled in. {options}"
            " lists the labels, a letter each: the letters are then scored. A label's score is the"
            " sum of its tokens' log-probabilities, not divided by its length."
        ),
    ] = None
    cache_salt: bounds.CacheSalt = None


class ScoreBody(PrioritizedFields, kw_only=True):
    query: str | list[int]
    items: str | list[str | list[int]]
    label_token_ids: list[int]
    apply_softmax: bool = False
    item_first: bool = False
    model: str | None = None
    cache_salt: bounds.CacheSalt = None


class TokenizeBody(IgnoredFields, kw_only=True):
    """One of prompt and messages. add_special_tokens: None: true for a prompt, false for messages,
    whose template has them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(IgnoredFields, kw_only=True):
    model: str | None = None
    tokens: list[int]


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A generation request's fields after checking. `sampling.max_tokens` and `sampling.choices`
    are set per prompt; max_tokens None: not stated. choices_field: what `choices` came in."""

    sampling: Sampling
    max_tokens: int | None
    priority: Priority
    stops: tuple[str, ...]
    choices: tuple[str, ...] | None
    choices_field: str
    n: int
    stream: bool
    include_usage: bool


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the API must know of the model. vocab_size: rows of the embedding (token ids beyond it
    are refused), which may be more than the tokenizer has."""

    name: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created: int = 0
    expert_execution: Literal["exact", "speculated"] = "exact"
