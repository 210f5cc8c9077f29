"""The requests of the regular clients, each with one right answer in float32."""

from typing import Any, NamedTuple

from contracts.config import BUNDLED

STREAMED_TOKENS, FEW_TOKENS = 64, 24
SPAM = "WINNER! Claim your free 1000 pound prize now, call before midnight."
LABELS = {"model": BUNDLED, "labels": ["no", "yes"], "template": "Message: {text}\nSpam:"}
BULK_ROWS = 12


class Question(NamedTuple):
    """kind: "greedy", "seeded", "classify" or "bulk"."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))


class Load(NamedTuple):
    """by_kind: requests, in turn. at_once: clients by kind. learned: repetitions before the first
    fault. rest_s: pause of a client after an answer that is not streamed."""

    by_kind: dict[str, list[Question]]
    at_once: dict[str, int]
    learned: int = 2
    rest_s: float = 0.0


def _stream(kind: str, number: int, tokens: int, **fields: Any) -> Question:
    prompt = f"Review number {number}: I have had this for {number} weeks. {SPAM * (number % 3)}"
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body = {"model": BUNDLED, "prompt": prompt, "max_tokens": tokens, **options, **fields}
    return Question(kind, "/v1/completions", body)


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40, "presence_penalty": 0.8},
    {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.02, "logit_bias": {"60": 2.0}, "logprobs": 2},
    {"temperature": 1.0, "n": 2},
]


def full_load() -> Load:
    """Without a pause."""
    at_once = {"greedy": 2, "seeded": 2, "classify": 1, "bulk": 1}
    return Load(_questions(STREAMED_TOKENS, SAMPLING, 6), at_once)


def light_load() -> Load:
    """One client of each kind, few questions, short streams: what a busy machine answers soon."""
    chosen = {kind: some[:3] for kind, some in _questions(FEW_TOKENS, SAMPLING[2:5], 2).items()}
    return Load(chosen, dict.fromkeys(chosen, 1), learned=1, rest_s=0.1)


def _questions(
    tokens: int, sampling: list[dict[str, Any]], greedy: int
) -> dict[str, list[Question]]:
    rows = [f"Message {row}. {SPAM[: 10 + 5 * row]}" for row in range(BULK_ROWS)]
    return {
        "greedy": [_stream("greedy", number, tokens, temperature=0) for number in range(greedy)],
        "seeded": [
            _stream("seeded", 10 + number, tokens, seed=number, **fields)
            for number, fields in enumerate(sampling)
        ],
        "classify": [
            Question("classify", "/v1/classify", {"input": rows[start : start + 2], **LABELS})
            for start in range(0, 8, 2)
        ],
        "bulk": [
            Question("bulk", "/v1/classify", {"input": rows, "priority": "be", **LABELS}),
            Question("bulk", "/v1/classify", {"input": rows[::-1], "priority": "be", **LABELS}),
        ],
    }
