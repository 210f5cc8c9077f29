"""A checkpoint's tokenizer: the ids that `transformers` gives, without importing it."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from contracts.errors import RequestError
from models.chat_template import ChatTemplate, Message
from models.continuations import END_CHARACTERS, end_of, rows_with
from models.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from models.tokenizer_files import read_tokenizer_files

THREAD_ABOVE_CHARACTERS = 16_384  # below it, encoding costs less than handing it to a thread
POOL_ABOVE_CHARACTERS = 2_048  # below it, encoding costs less than waking threads of the library
MAX_REMEMBERED = 4096
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Immutable after loading, and safe to use from several threads at once."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens or {}
        self._chat = ChatTemplate(chat_template, self.special_tokens) if chat_template else None
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_level = _is_byte_level(backend)
        self._bytes_cache: dict[int, bytes] = {}
        self._remembered: dict[str, list[int]] = {}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer in a Hugging Face folder. Raises CheckpointError, in one line.

        As in `transformers` 5, tokenizer.json alone says which special tokens `encode` adds;
        `add_bos_token` beside it counts for nothing.
        """
        files = read_tokenizer_files(folder)
        return cls(
            files.backend, special_tokens=files.special_tokens, chat_template=files.chat_template
        )

    # ---- text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Raises RequestError if it holds half of a surrogate pair."""
        return self.encode_many([text], add_special_tokens)[0]

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            _check_encodable(text)
        special = add_special_tokens
        if sum(map(len, texts)) <= POOL_ABOVE_CHARACTERS:
            one_by_one = (self._backend.encode(text, add_special_tokens=special) for text in texts)
            return [list(encoding.ids) for encoding in one_by_one]
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=special)
        return [list(encoding.ids) for encoding in encodings]

    async def encode_many_async(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """`encode_many`, in a thread where that would hold up an event loop."""
        if sum(map(len, texts)) <= THREAD_ABOVE_CHARACTERS:
            return self.encode_many(texts, add_special_tokens)
        return await asyncio.to_thread(self.encode_many, texts, add_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def render_chat(self, messages: Sequence[Message], **variables: object) -> str:
        """The prompt text of a conversation. Raises RequestError about `messages`."""
        if self._chat is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions instead", "messages"
            )
        return self._chat.render(messages, **variables)

    def encode_chat(self, messages: Sequence[Message], **variables: object) -> list[int]:
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    async def encode_chat_async(
        self, messages: Sequence[Message], **variables: object
    ) -> list[int]:
        text = self.render_chat(messages, **variables)
        return (await self.encode_many_async([text], add_special_tokens=False))[0]

    def continuation(self, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of the prompt, and of what follows it: see `continuations`."""
        prompt_ids, (continuation_ids,) = self.continuations(prompt, [continuation])
        return prompt_ids, continuation_ids

    def continuations(
        self, prompt: str, continuations: Sequence[str]
    ) -> tuple[list[int], list[list[int]]]:
        """Ids of the prompt, and per continuation the ids that follow it.

        The rule of lm-eval: white space at the end of the prompt belongs to the continuation, and
        a continuation is encode(prompt + continuation) without its first len(encode(prompt)) ids.
        """
        return self.continuations_many([(prompt, continuations)])[0]

    def continuations_many(
        self, pairs: Sequence[tuple[str, Sequence[str]]]
    ) -> list[tuple[list[int], list[list[int]]]]:
        """`continuations` of many prompts, encoded together.

        What follows a prompt is encoded behind its last line or words only, where the prompt's own
        ids show that these are encoded alike by themselves: once for all prompts that end alike.
        """
        stems = [prompt.rstrip() for prompt, _ in pairs]
        prompt_ids = self.encode_many(stems)
        ends = [end_of(stem) for stem in stems]
        known = self._encode_distinct(ends)
        heads = [
            end if end and ids[-len(known[end]) :] == known[end] else stem
            for end, ids, stem in zip(ends, prompt_ids, stems, strict=True)
        ]
        texts = [
            [head + prompt[len(stem) :] + text for text in continuations]
            for head, stem, (prompt, continuations) in zip(heads, stems, pairs, strict=True)
        ]
        is_whole = [head is stem for head, stem in zip(heads, stems, strict=True)]
        whole = iter(self.encode_many(rows_with(texts, is_whole, True)))
        known |= self._encode_distinct(rows_with(texts, is_whole, False))
        return [
            (ids, [next(whole)[len(ids) :] for _ in row])
            if alone
            else (ids, [known[text][len(known[head]) :] for text in row])
            for alone, head, ids, row in zip(is_whole, heads, prompt_ids, texts, strict=True)
        ]

    def _encode_distinct(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Ids without special tokens. Those of short texts are remembered."""
        ids: dict[str, list[int]] = {}
        new = []
        for text in dict.fromkeys(texts):
            known = self._remembered.get(text)
            if known is None:
                new.append(text)
            else:
                ids[text] = known
        ids |= zip(new, self.encode_many(new, add_special_tokens=False), strict=True)
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered = {}
        self._remembered |= {text: ids[text] for text in new if len(text) <= END_CHARACTERS}
        return ids

    # ---- ids to text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one stream of tokens."""
        if self._byte_level:
            return ByteDetokenizer(self._shown_bytes if skip_special_tokens else self.token_bytes)
        return WindowDetokenizer(
            functools.partial(self.decode, skip_special_tokens=False),
            self._fallback_byte,
            self._is_shown if skip_special_tokens else self._is_known,
        )

    @functools.cached_property
    def _bytes_of_character(self) -> dict[str, int]:
        return {character: byte for byte, character in _byte_level_alphabet().items()}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; b"" outside the vocabulary."""
        known = self._bytes_cache.get(token_id)
        if known is None:
            known = self._bytes_cache[token_id] = self._look_up_bytes(token_id)
        return known

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self._byte_level:
            byte = self._fallback_byte(token_id)
            return token.replace("▁", " ").encode() if byte is None else bytes([byte])
        table = self._bytes_of_character
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return str(token).encode()

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def _fallback_byte(self, token_id: int) -> int | None:
        match = _FALLBACK_BYTE.fullmatch(self._backend.id_to_token(token_id) or "")
        return int(match[1], 16) if match else None

    def _is_known(self, token_id: int) -> bool:
        return self._backend.id_to_token(token_id) is not None

    def _is_shown(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._is_known(token_id)


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"text is not valid Unicode at character {error.start}", None) from None


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    kinds = [part["type"] for part in state.get("decoders", [state])]
    return kinds[0] == "ByteLevel" and set(kinds[1:]) <= {"Fuse"}


def _byte_level_alphabet() -> dict[int, str]:
    """Which printable character stands for each byte (GPT-2): printable bytes for themselves, the
    others for U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet.update({byte: chr(0x100 + index) for index, byte in enumerate(others)})
    return alphabet
