"""Log-probabilities in the two forms that OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.http import response_types
from cluster.http.responses import Json, json_list
from cluster.http.text import ShownToken
from models.text.tokenizer import Tokenizer


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ShownToken], num_top: int
) -> response_types.CompletionLogprobs:
    """The form of /v1/completions: four parallel lists. wanted: alternatives asked for.

    The first token of a prompt has no log-probability: null. `top_logprobs` holds the chosen token
    too, so it may have one more entry than asked for; null where the rank gave no alternatives.
    """
    names: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token in tokens:
        name = token_name(tokenizer, token.token_id)
        names.append(name)
        offsets.append(token.offset)
        if token.logprob is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(token.logprob.logprob)
        alternatives = {token_name(tokenizer, other): p for other, p in token.logprob.top}
        known = alternatives or not num_top
        tops.append({**alternatives, name: token.logprob.logprob} if known else None)
    return response_types.CompletionLogprobs(
        tokens=names, token_logprobs=values, top_logprobs=tops, text_offset=offsets
    )


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ShownToken]
) -> response_types.ChatLogprobs:
    """The form of /v1/chat/completions: one object per token, with its bytes."""
    content = []
    for token in tokens:
        if token.logprob is None:
            continue
        top = [_alternative(tokenizer, *other) for other in token.logprob.top]
        chosen = _alternative(tokenizer, token.token_id, token.logprob.logprob)
        content.append(
            response_types.ChatTokenLogprob(
                token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top
            )
        )
    return response_types.ChatLogprobs(content=content, refusal=None)


class CompletionLogprobs:
    """`completion_logprobs`, put together from slices of the tokens."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._lists: dict[str, Json] = {}

    def add(self, tokens: Sequence[ShownToken]) -> int:
        if not tokens:
            return 0
        grown = 0
        lists = completion_logprobs(self._tokenizer, tokens, self._num_top)
        for name, values in msgspec.structs.asdict(lists).items():
            slices = self._lists.setdefault(name, [])
            slices.append(msgspec.json.encode(values)[1:-1])
            grown += len(slices[-1])
        return grown

    def pieces(self) -> Json:
        if not self._lists:
            return [msgspec.json.encode(completion_logprobs(self._tokenizer, [], self._num_top))]
        pieces: Json = []
        for name, slices in self._lists.items():
            pieces += [b"," if pieces else b"{", msgspec.json.encode(name), b":"]
            pieces += json_list([each] for each in slices)
        return [*pieces, b"}"]


class ChatLogprobs:
    """`chat_logprobs`, put together from slices of the tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._slices: Json = []

    def add(self, tokens: Sequence[ShownToken]) -> int:
        content = chat_logprobs(self._tokenizer, tokens).content
        if not content:
            return 0
        self._slices.append(msgspec.json.encode(content)[1:-1])
        return len(self._slices[-1])

    def pieces(self) -> Json:
        content = json_list([each] for each in self._slices)
        return [b'{"content":', *content, b',"refusal":null}']


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; `bytes:\\xe2\\x82` for one that is only part of a character."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _alternative(tokenizer: Tokenizer, token_id: int, logprob: float) -> response_types.TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return response_types.TopLogprob(
        token=data.decode(errors="replace"), logprob=logprob, bytes=list(data)
    )
