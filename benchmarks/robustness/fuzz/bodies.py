"""Valid bodies of every POST route, from which mutations start."""

from typing import Any

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
