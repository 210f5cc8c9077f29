"""What a request's fields accept beyond their types, as the OpenAPI document shows it.

The checks (`checks.py`, `contracts/sampling_limits.py`, the endpoints) refuse the rest. What
depends on the model or the configuration is in `openapi_bounds.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from contracts.requests import Priority
from contracts.sampling_limits import (
    INT64,
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    RANGES,
)

Schema = dict[str, Any]

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_N = 128
MAX_CHOICE_CHARACTERS = 8192  # of all choices together
MAX_CACHE_SALT_CHARACTERS = 1024
NULL: Schema = {"type": "null"}


def within(low: float, high: float | None = None) -> Meta:
    """Both bounds are allowed."""
    return shown(minimum=low) if high is None else shown(minimum=low, maximum=high)


def shown(**schema: Any) -> Meta:
    """In the document only: what is refused is refused by the checks, with the number."""
    return Meta(extra_json_schema=schema)


def unsupported(*neutral: Any) -> Meta:
    """Of a field that is not supported: these values (besides null) change nothing."""
    return Meta(
        description="Not supported. Only values that change nothing are accepted.",
        extra_json_schema={"enum": [None, *neutral]},
        extra={"neutral": neutral},
    )


def described(description: str) -> Meta:
    return Meta(description=description)


Text = Annotated[str, shown(minLength=1)]
_Stop = Annotated[str, shown(minLength=1, maxLength=MAX_STOP_CHARACTERS)]
_Penalty = Annotated[float, within(-2, 2)] | None
Choices = Annotated[list[Text], shown(minItems=1, maxItems=MAX_CHOICES)]

Temperature = Annotated[
    Annotated[float, within(0, 2)] | None,
    described(
        "Below 1e-5: the likeliest token. Applied in this order, as in vLLM: choices,"
        " min_tokens, logit_bias, repetition_penalty, frequency_penalty, presence_penalty,"
        " temperature, min_p, top_k, top_p. logprobs are of the distribution before all that."
    ),
]
TopP = Annotated[float, shown(exclusiveMinimum=0, maximum=1)] | None
TopK = Annotated[Annotated[int, within(-1, INT64 - 1)] | None, described("-1 and 0: no limit.")]
MinP = Annotated[
    Annotated[float, within(0, 1)] | None, described("Of the likeliest token's probability.")
]
Penalty = Annotated[_Penalty, described("Of generated tokens.")]
RepetitionPenalty = Annotated[
    Annotated[float, within(*RANGES["repetition_penalty"])] | None, described("Of all tokens.")
]
Seed = Annotated[
    Annotated[int, within(-INT64, INT64 - 1)] | None,
    described("Choice i of a prompt draws from seed + i."),
]
BestOf = Annotated[Annotated[int, within(1, MAX_N)] | None, described("Only as large as n.")]
LogitBias = Annotated[
    Annotated[
        dict[str, Annotated[float, within(-MAX_BIAS, MAX_BIAS)]],
        shown(maxProperties=MAX_BIASES, propertyNames={"pattern": "^[0-9]{1,10}$"}),
    ]
    | None,
    described("By token id."),
]
Stop = _Stop | Annotated[list[_Stop], shown(maxItems=MAX_STOPS)] | None
GuidedChoice = Annotated[
    Choices | None,
    described(f"The answer is one of these texts, of {MAX_CHOICE_CHARACTERS} characters together."),
]
Unused = Annotated[Any, Meta(description="Not supported.", extra_json_schema=NULL)]
Logprobs = Annotated[int, within(0, MAX_LOGPROBS)] | None
RequestPriority = Annotated[
    Annotated[str, shown(enum=[priority.label for priority in Priority])]
    | Annotated[int, within(0)]
    | None,
    described("Latency-sensitive (ls, 0) goes before best-effort (be, above 0)."),
]
ServiceTier = Annotated[
    Literal["auto", "default", "flex", "priority", "scale"] | None,
    described("OpenAI's name for a class: flex is be, priority is ls, others are the key's own."),
]
CacheSalt = Annotated[
    Annotated[str, shown(minLength=1, maxLength=MAX_CACHE_SALT_CHARACTERS)] | None,
    described("Prefixes are found again only by requests with the same one."),
]
