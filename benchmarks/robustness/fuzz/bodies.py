"""Valid bodies of every endpoint: what mutations start from."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.robustness.fuzz.trees import Members, tree_of

TEXT = "WINNER! Claim your free prize now, call before midnight."
USER = {"role": "user", "content": f"Is this message spam?\n{TEXT}"}
SPAM = {"template": "Message: {text}\nSpam:", "labels": ["no", "yes"]}

BODIES: dict[str, list[dict[str, Any]]] = {
    "/scale": [{"attention_ranks": 2}, {"expert_ranks": 3, "prefill_workers": 1}],
    "/v1/completions": [
        {"prompt": f"Message: {TEXT}\nSpam:", "max_tokens": 1, "temperature": 0},
        {"prompt": ["Review: good.\nSentiment:", "b"], "n": 2, "max_tokens": 4, "stop": ["\n"]},
        {"prompt": [60, 61, 62], "logprobs": 3, "echo": True, "max_tokens": 0},
        {"prompt": [[60, 61], [62]], "top_p": 0.9, "top_k": 20, "seed": 7, "max_tokens": 3},
        {
            "prompt": "The",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
            "priority": "be",
            "ignore_eos": True,
            "logprobs": 1,
        },
        {"prompt": "The", "best_of": 1, "n": 1, "temperature": 0.7, "user": "somebody"},
    ],
    "/v1/chat/completions": [
        {"messages": [USER], "max_tokens": 4, "temperature": 0},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
                {"role": "assistant", "content": "Yes?"},
                USER,
            ],
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "max_completion_tokens": 4,
        },
        {"messages": [USER], "stream": True, "stop": "x", "seed": 1, "max_tokens": 4},
        {
            "messages": [USER],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "max_tokens": 3,
            "priority": 1,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ],
    "/v1/classify": [
        {"input": TEXT, **SPAM},
        {"input": ["a", "Running late."], "prefix": "Norm.\n", "labels": ["immoral", "moral"]},
        {
            "input": [TEXT, "b"],
            "template": "{prefix}{text}\n{options}\nAnswer:",
            "labels": ["exchange rate", "exchange charge", "card swallowed"],
            "prefix": "What does this customer want?\n",
            "priority": "be",
        },
        {
            "input": "I love this song",
            "multi_label": True,
            "template": "{text}\nIs this about {label}? Answer:",
            "labels": ["love", "anger", "joy"],
        },
    ],
    "/v1/score": [
        {"query": "Message: ", "items": ["a", TEXT], "label_token_ids": [60, 61]},
        {"query": [60, 61], "items": [[62], [63, 64]], "label_token_ids": [5], "item_first": True},
        {"query": "a", "items": "b", "label_token_ids": [1, 2, 3], "apply_softmax": True},
    ],
    "/tokenize": [{"prompt": TEXT}, {"prompt": "a", "add_special_tokens": False}],
    "/detokenize": [{"tokens": [60, 61, 62]}],
}


class Documented:
    """What the server's own OpenAPI document says of its POST routes."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._schemas = document.get("components", {}).get("schemas", {})
        self.routes: dict[str, dict[str, Any]] = {}
        for path, operations in document["paths"].items():
            if "post" in operations:
                content = operations["post"]["requestBody"]["content"]["application/json"]
                self.routes[path] = self._followed(content["schema"])

    def valid_bodies(self, path: str, model: str) -> list[Members]:
        """Trees to start from: those above, or, of a route they do not know, what its document
        requires."""
        schema = self.routes[path]
        bodies = BODIES.get(path)
        if bodies is None:
            dice = random.Random(path)
            fields = schema.get("properties", {})
            bodies = [{name: self.made(fields[name], dice) for name in schema.get("required", ())}]
        named = {"model": model} if "model" in schema.get("properties", {}) else {}
        return [tree_of({**named, **body}) for body in bodies]

    def fields(self, path: str) -> list[tuple[str, dict[str, Any]]]:
        return sorted(self.routes[path].get("properties", {}).items())

    def made(self, schema: dict[str, Any], dice: random.Random, depth: int = 0) -> Any:
        """Something that fits `schema`, or nearly: formats and patterns are not looked at."""
        schema = self._followed(schema)
        for choice in ("enum", "anyOf", "oneOf"):
            if choice in schema:
                one = dice.choice(schema[choice])
                return one if choice == "enum" else self.made(one, dice, depth + 1)
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        kind = dice.choice(kind) if isinstance(kind, list) else kind
        low, high = schema.get("minimum", 0), schema.get("maximum", 100)
        if kind == "integer":
            return dice.choice([low, high, dice.randint(int(low), max(int(low), int(high)))])
        if kind == "number":
            return dice.choice([low, high, dice.uniform(low, high)])
        if kind == "boolean":
            return dice.random() < 0.5
        if kind == "string":
            return dice.choice(["a", "yes", TEXT, "é{text}"])
        if kind == "array" and depth < 6:
            count = max(schema.get("minItems", 0), dice.randrange(4))
            return [self.made(schema.get("items", {}), dice, depth + 1) for _ in range(count)]
        if kind == "object" and depth < 6:
            fields = schema.get("properties", {})
            chosen = {name for name in fields if dice.random() < 0.5} | {
                *schema.get("required", ())
            }
            return {name: self.made(fields[name], dice, depth + 1) for name in sorted(chosen)}
        return None

    def _followed(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema
