"""Request bodies of the HTTP API, as msgspec decodes them.

The bounds that a field declares are enforced by the decoder and shown in the OpenAPI document.
Bounds that depend on the model or the configuration are checked in `body.py` and by the endpoints.
Unknown fields are rejected. Fields that are known but not supported are declared, so that values
without effect can be accepted.
"""

from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from cluster.classification.classify import MAX_LABELS
from contracts.requests import (
    INT64,
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_TOKENS,
    RANGES,
    Priority,
    Sampling,
)

Schema = dict[str, Any]

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_N = 128
MAX_TOOLS = 512
MAX_CHOICE_CHARACTERS = 8192  # of all choices together
MAX_GRAMMAR_SOURCE = 1 << 16  # characters of a schema, grammar or expression
MAX_CACHE_SALT_CHARACTERS = 1024
MAX_LABEL_TOKENS = 1024
NULL: Schema = {"type": "null"}


def _range(name: str) -> Meta:
    low, high = RANGES[name]
    return Meta(ge=low, le=high)


def documented(**schema: Any) -> Meta:
    """JSON Schema keywords for the document. A check elsewhere enforces them."""
    return Meta(extra_json_schema=schema)


def unsupported(*neutral: Any) -> Meta:
    """Metadata of an unsupported field. It accepts null and the values `neutral`."""
    return Meta(
        description="Not supported. Only values that change nothing are accepted.",
        extra_json_schema={"enum": [None, *neutral]},
        # typing caches Annotated by equality, and 1.0 == True: the text differs
        extra={"neutral": neutral, "text": repr(neutral)},
    )


def described(description: str) -> Meta:
    return Meta(description=description)


Text = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0)]
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Choices = Annotated[list[Text], Meta(min_length=1, max_length=MAX_CHOICES)]
GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_SOURCE)]
JsonSchema = dict[str, Any] | GrammarText
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None
Unused = Annotated[Any, Meta(description="Not supported.", extra_json_schema=NULL)]
RequestPriority = Annotated[
    Annotated[str, documented(enum=[priority.label for priority in Priority])]
    | Annotated[int, Meta(ge=0)]
    | None,
    described("Latency-sensitive (ls, 0) goes before best-effort (be, above 0)."),
]
CacheSalt = Annotated[
    Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARACTERS)] | None,
    described("Only requests with the same salt share cached prefixes."),
]

GenerationPrompt = Annotated[
    bool | None, described("Default: true. false: the prompt ends behind the last message.")
]
Continues = Annotated[
    bool | None,
    described("The prompt ends within the last message. Needs add_generation_prompt=false."),
]
TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class StrictFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body that rejects undeclared fields."""


class IgnoredFields(StrictFields, kw_only=True):
    """Fields that OpenAI clients send and that do not affect the answer. Any value is accepted."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None
    request_id: Any = None  # vLLM's; here the header X-Request-Id names a request


class PrioritizedFields(IgnoredFields, kw_only=True):
    """Fields of a request that runs in a priority class."""

    priority: RequestPriority = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority", "scale"] | None,
        described("OpenAI's name of a class: flex is be, priority is ls, others the key's class."),
    ] = None
    cache_salt: CacheSalt = None


class UnsupportedFields(PrioritizedFields, kw_only=True):
    """Fields of OpenAI, vLLM and SGLang that are not supported."""

    allowed_token_ids: Annotated[Any, unsupported()] = None
    audio: Annotated[Any, unsupported()] = None
    bad_words: Annotated[Any, unsupported([])] = None
    chat_template: Annotated[Any, unsupported()] = None
    documents: Annotated[Any, unsupported([])] = None
    early_stopping: Annotated[Any, unsupported(False)] = None
    ebnf: Annotated[Any, unsupported()] = None
    function_call: Annotated[Any, unsupported("none", "auto")] = None
    functions: Annotated[Any, unsupported([])] = None
    include_reasoning: Annotated[Any, unsupported(True)] = None
    include_stop_str_in_output: Annotated[Any, unsupported(False)] = None
    json_schema: Annotated[Any, unsupported()] = None
    kv_transfer_params: Annotated[Any, unsupported()] = None
    length_penalty: Annotated[Any, unsupported(1.0)] = None
    logits_processors: Annotated[Any, unsupported([])] = None
    lora_path: Annotated[Any, unsupported()] = None
    mm_processor_kwargs: Annotated[Any, unsupported()] = None
    min_new_tokens: Annotated[Any, unsupported(0)] = None
    modalities: Annotated[Any, unsupported(["text"])] = None
    moderation: Annotated[Any, unsupported()] = None
    no_stop_trim: Annotated[Any, unsupported(False)] = None
    prediction: Annotated[Any, unsupported()] = None
    prompt_cache_options: Annotated[Any, unsupported()] = None
    prompt_logprobs: Annotated[Any, unsupported()] = None
    regex: Annotated[Any, unsupported()] = None
    return_hidden_states: Annotated[Any, unsupported(False)] = None
    return_token_ids: Annotated[Any, unsupported(False)] = None
    return_tokens_as_token_ids: Annotated[Any, unsupported(False)] = None
    rid: Annotated[Any, unsupported()] = None
    separate_reasoning: Annotated[Any, unsupported(True)] = None
    skip_special_tokens: Annotated[Any, unsupported(True)] = None
    spaces_between_special_tokens: Annotated[Any, unsupported(True)] = None
    suffix: Annotated[Any, unsupported("")] = None
    truncate_prompt_tokens: Annotated[Any, unsupported()] = None
    use_beam_search: Annotated[Any, unsupported(False)] = None
    verbosity: Annotated[Any, unsupported("medium")] = None
    web_search_options: Annotated[Any, unsupported()] = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    field.name: get_args(field.type)[1].extra["neutral"]
    for field in msgspec.structs.fields(UnsupportedFields)
    if get_origin(field.type) is Annotated and "neutral" in (get_args(field.type)[1].extra or ())
}


class StreamOptions(StrictFields, kw_only=True):
    """Options of a stream. `include_obfuscation` is OpenAI's padding of chunks; it is ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None, described("Every chunk has the usage so far; needs include_usage.")
    ] = None
    include_obfuscation: Any = None


class StructuredOutputs(StrictFields, kw_only=True):
    """Structured output as vLLM names it: one of these fields."""

    choice: Choices | None = None
    grammar: GrammarText | None = None
    json: JsonSchema | None = None
    json_object: bool | None = None
    regex: GrammarText | None = None
    structural_tag: Unused = None


class SchemaFormat(StrictFields, kw_only=True):
    """A named JSON schema. It always applies in full, whatever `strict` says."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictFields, kw_only=True):
    """OpenAI's form of the answer: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class GenerationBody(UnsupportedFields, kw_only=True):
    """Fields that completions and chat completions share."""

    model: str
    max_tokens: Annotated[Annotated[int, Meta(ge=0)] | None, described("0 only with echo.")] = None
    add_special_tokens: Annotated[
        bool | None,
        described("Default: true for completions, false for chats, whose template adds them."),
    ] = None
    max_completion_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, described("Takes precedence over max_tokens.")
    ] = None
    temperature: Annotated[
        Annotated[float, _range("temperature")] | None,
        described(
            "Below 1e-5: the likeliest token. Applied in this order, as in vLLM: choices or"
            " grammar, min_tokens, logit_bias, repetition_penalty, frequency_penalty,"
            " presence_penalty, temperature, min_p, top_k, top_p. logprobs are of the distribution"
            " before all that."
        ),
    ] = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=INT64 - 1)] | None, described("-1 and 0: no limit.")
    ] = None
    min_p: Annotated[
        Annotated[float, _range("min_p")] | None,
        described("Relative to the likeliest token's probability."),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-INT64, le=INT64 - 1)] | None,
        described("Choice i of a prompt draws from seed + i."),
    ] = None
    presence_penalty: Annotated[
        Annotated[float, _range("presence_penalty")] | None, described("Of generated tokens.")
    ] = None
    frequency_penalty: Annotated[
        Annotated[float, _range("frequency_penalty")] | None, described("Of generated tokens.")
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, _range("repetition_penalty")] | None, described("Of all tokens.")
    ] = None
    logit_bias: Annotated[
        Annotated[
            dict[
                Annotated[str, Meta(pattern="^[0-9]{1,10}$")],
                Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)],
            ],
            Meta(max_length=MAX_BIASES),
        ]
        | None,
        described("By token id."),
    ] = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        described(
            "Nothing ends the answer before; at most max_tokens. Not with structured output."
        ),
    ] = None
    guided_choice: Annotated[
        Choices | None,
        described(
            f"The answer is one of these texts, of {MAX_CHOICE_CHARACTERS} characters together."
        ),
    ] = None
    guided_json: Annotated[
        JsonSchema | None,
        described("The answer is JSON of this schema, an object or its text, in its order."),
    ] = None
    guided_regex: Annotated[
        GrammarText | None, described("The whole answer matches; syntax of Rust's regex.")
    ] = None
    guided_grammar: Annotated[
        GrammarText | None, described("The answer follows a grammar in Lark's notation, or GBNF.")
    ] = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_N)] | None, described("Only as large as n.")
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[Logprobs, described("Alternatives per token.")] = None
    echo: bool | None = None


class ContentPart(StrictFields, kw_only=True):
    """A part of a message. Only text is supported."""

    type: Annotated[str, documented(const="text")]
    text: str | None = None
    cache_control: Annotated[Any, described("Ignored.")] = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class ChatMessage(StrictFields, kw_only=True):
    """A message.

    `refusal`, `annotations`, `audio` and `function_call` are accepted because clients return
    answers as they received them; templates do not receive them.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, described("As reasoning_content.")] = None
    thinking: Annotated[str | None, described("As reasoning_content.")] = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class ToolFunction(StrictFields, kw_only=True):
    """A function that the model may call. parameters: a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictFields, kw_only=True):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: ToolFunction


Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class ChatBody(GenerationBody, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Messages
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: Continues = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, described("Default: what fits behind the prompt.")
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Logprobs, described("Alternatives per token; needs logprobs.")] = None
    echo: Annotated[bool | None, documented(enum=[None, False])] = None
    reasoning_effort: str | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Annotated[str, documented(enum=["none", "auto", "required"])] | dict[str, Any] | None,
        described(
            "auto: the model decides. none: tools are left out of the prompt. required, or the"
            " object with a function's name: the answer is a call, without reasoning."
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, described("false: calls after the first are dropped.")
    ] = None


# Structs by the field that holds them.
NESTED: dict[str, type[msgspec.Struct]] = {
    "stream_options": StreamOptions,
    "structured_outputs": StructuredOutputs,
    "response_format": ResponseFormat,
    "json_schema": SchemaFormat,
    "messages": ChatMessage,
    "content": ContentPart,
    "tools": Tool,
    "function": ToolFunction,
}


class ClassifyBody(PrioritizedFields, kw_only=True):
    """The body of /v1/classify."""  # `classify.check_task` bounds labels and template

    model: str
    input: Text | Annotated[list[Text], Meta(min_length=1)]
    labels: Annotated[
        list[Annotated[str, documented(pattern=r"\S")]],
        documented(minItems=1, maxItems=MAX_LABELS, uniqueItems=True),
    ]
    prefix: str | None = None
    multi_label: Annotated[
        bool | None, described("Each label by itself: yes or no? Needs a template with {label}.")
    ] = None
    template: Annotated[
        Annotated[str, documented(pattern=r"\{text\}")] | None,
        described(
            "{text}, {prefix}, with multi_label {label}, are filled in. {options}"
            " lists the labels, a letter each: the letters are then scored. A label's score is the"
            " sum of its tokens' log-probabilities, not divided by its length."
        ),
    ] = None


class ScoreBody(PrioritizedFields, kw_only=True):
    """The body of /v1/score."""

    query: str | list[int]
    items: str | list[str | list[int]]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LABEL_TOKENS)]
    apply_softmax: bool = False
    item_first: bool = False
    model: str | None = None


class TokenizeBody(IgnoredFields, kw_only=True):
    """The body of /tokenize: a prompt or messages.

    By default `add_special_tokens` is true for a prompt and false for messages, whose template adds
    them.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: Continues = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(IgnoredFields, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class Structure(msgspec.Struct, frozen=True):
    """Restriction of an answer.

    kind: choice, json, regex or lark. field: of the request. before: reasoning that may precede the
    answer, as the start of a Lark rule.
    """

    field: str
    kind: str
    value: list[str] | dict[str, Any] | str
    before: str = ""


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Checked fields of a generation request.

    `sampling.max_tokens`, `choices` and `grammar` are set per prompt. max_tokens: None if the
    request does not set it. structure: what restricts the answer, not yet compiled.
    """

    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...]
    structure: Structure | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool = False


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model as the API knows it.

    vocab_size: rows of the embedding, which may exceed the tokenizer's; larger ids are rejected.
    sampling: what a request does not set. Its max_tokens bounds the default of a chat; 0: no bound.
    """

    name: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling: Sampling = Sampling(max_tokens=0)
    created: int = 0
    expert_execution: Literal["exact", "speculated"] = "exact"
    colocated: bool = False
    colocated_gain: float | None = None
