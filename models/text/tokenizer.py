"""A checkpoint's tokenizer, with the ids of `transformers` but without importing it.

Token ids become text incrementally, without broken characters, at linear cost.

*Byte level* (GPT-2, Qwen, DeepSeek, gpt-oss): a token is a run of bytes, which an incremental UTF-8
decoder decodes exactly. *All others* (SentencePiece with byte fallback, WordPiece): text depends on
neighbours, so a short window is decoded with and without the new tokens, and the difference is
returned:

    ids      ... c c c | p p p          c: context, already returned    p: pending
    text     decode(c+p)[len(decode(c)):]

The joined pieces equal the text of all ids decoded at once. A detokenizer that starts behind a
prompt `skip`s the prompt's last ids: "▁world" at the start is "world", behind a word " world".
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from contracts.errors import RequestError, TooLongError
from models.text.answer_format import AnswerFormat, find_format
from models.text.chat_template import (
    PIECE_CHARACTERS,
    ChatTemplate,
    EncodingSteps,
    Message,
    finish,
    pieces_of,
)
from models.text.tokenizer_files import TokenizerFiles, byte_level_alphabet, read_tokenizer_files

THREAD_ABOVE_CHARACTERS = 16_384  # below, encoding costs less than a thread switch
POOL_ABOVE_CHARACTERS = 2_048  # below, encoding costs less than waking library threads
MAX_CACHED_TEXTS = 4096
NORMALISED_CHARACTERS = 4  # that may become one (NFC: three letters of Hangul)
CUT_TOKENS = 64  # upper bound of additional tokens of a cut word
CONTEXT_TOKENS = 32  # of a prompt that affect how the text behind it is decoded
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteDetokenizer:
    """The results of all pushes and a flush at the end, joined, are the text of all ids.

    token_bytes: the bytes of a token; b"" for hidden tokens.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def skip(self, token_ids: Sequence[int]) -> None:
        """Start behind these ids, whose text is known. Call before the first push.

        An unfinished character at their end is part of the text that follows.
        """
        self.push(token_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these ids complete. Ids outside the vocabulary are skipped."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        """Return what is held back; an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer with a window. decode: ids to text.

    fallback_byte: the byte of a `<0xE2>`-like token, or None. visible: False for special tokens and
    ids outside the vocabulary.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        fallback_byte: Callable[[int], int | None],
        visible: Callable[[int], bool],
    ) -> None:
        self._decode = decode
        self._fallback_byte = fallback_byte
        self._visible = visible
        self._context: list[int] = []
        self._pending: list[int] = []

    def skip(self, token_ids: Sequence[int]) -> None:
        self.push(token_ids)
        if self._pending and "\ufffd" not in self._decode(self._pending):
            self._emit()

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def flush(self) -> str:
        return self._emit() if self._pending else ""

    def _push_one(self, token_id: int) -> str:
        if not self._visible(token_id):
            return ""
        self._pending.append(token_id)
        # Neighbouring byte tokens form a run: if a later one is invalid UTF-8, none is shown
        # as a character, so a run is certain only after its end.
        return "" if self._fallback_byte(token_id) is not None else self._emit()

    def _emit(self) -> str:
        before = self._decode(self._context)
        piece = self._decode(self._context + self._pending)[len(before) :]
        # A piece without text (a lone space that the decoder strips) stays in the window: the next
        # piece may need it as its predecessor.
        self._context = self._pending if piece else self._context + self._pending
        self._pending = []
        return piece


Detokenizer = ByteDetokenizer | WindowDetokenizer


class Tokenizer:
    """Immutable after loading, and thread-safe."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._backend = backend = files.backend
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = files.special_tokens
        self._chat, tools = (
            ChatTemplate(source, self.special_tokens) if source else None
            for source in (files.chat_template, files.tool_template)
        )
        self._tools_chat = tools or self._chat
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(  # of a normalised token, the library shows the text
            i for i, token in added.items() if token.special and token.content == self.token_text(i)
        )
        self._byte_level = _is_byte_level(backend)
        self._bytes_cache: dict[int, bytes] = {}
        self._ids_cache: dict[str, list[int]] = {}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a Hugging Face folder. Raises CheckpointError, in one line.

        As in `transformers` 5, only tokenizer.json determines the special tokens of `encode`;
        `add_bos_token` is ignored.
        """
        return cls(read_tokenizer_files(folder))

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json."""
        return str(self._backend.to_str())

    # ---- text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. Raises RequestError for half of a surrogate pair."""
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

    def encode_steps(
        self,
        texts: Iterable[str],
        *,
        param: str,
        max_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> EncodingSteps[list[list[int]]]:
        """Run `encode_many` in pieces.

        Raises TooLongError about `param` for texts above max_tokens.

        A text longer than a piece is tokenised only until it exceeds max_tokens.
        """
        ids: list[list[int]] = []
        for piece in pieces_of(texts):
            yield from self._length_steps(piece[0], max_tokens, param)
            ids += self.encode_many(piece, add_special_tokens)
            yield sum(map(len, ids[-len(piece) :]))
        return ids

    def _length_steps(self, text: str, max_tokens: int | None, param: str) -> EncodingSteps[None]:
        """Raise TooLongError for far more tokens; pieces have about as many as the whole text."""
        if max_tokens is None or len(text) <= PIECE_CHARACTERS:
            return
        tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            max_piece_tokens = max_tokens + CUT_TOKENS * (start // PIECE_CHARACTERS + 1)
            (ids,) = self.encode_many([text[start : start + PIECE_CHARACTERS]], False)
            tokens += len(ids)
            if tokens > max_piece_tokens:
                raise TooLongError(
                    f"{param}: a text of {len(text)} characters has more than {max_tokens} tokens,"
                    " which is what the model's context holds: shorten it",
                    param,
                )
            yield 0

    @functools.cached_property
    def answer_format(self) -> AnswerFormat:
        """The format of a chat's answers, as the added tokens state it."""
        added = self._backend.get_added_tokens_decoder().values()
        return find_format([token.content for token in added])

    @functools.cached_property
    def tag_ids(self) -> dict[str, int]:
        """Ids of the tags of the answer format."""
        tags, added = self.answer_format.tags, self._backend.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.content in tags}

    @functools.cached_property
    def tag_texts(self) -> dict[int, str]:
        """Texts of special tokens that are tags of the answer format, by id."""
        tags = self.answer_format.tags
        return {token_id: text for token_id, text in self.special_texts.items() if text in tags}

    @property
    def has_tools(self) -> bool:
        """Return whether the chat template shows tools."""
        return self._tools_chat is not None and self._tools_chat.has_tools

    @property
    def eos_token_ids(self) -> list[int]:
        """The id of eos_token, if it is set."""
        token_id = self._backend.token_to_id(self.special_tokens.get("eos_token", ""))
        return [] if token_id is None else [token_id]

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def render_chat(self, messages: Sequence[Message], **variables: object) -> str:
        """Return the prompt text of a conversation. Raises RequestError about `messages`."""
        return finish(self._template(variables).render_steps(messages, variables))

    def encode_chat(self, messages: Sequence[Message], **variables: object) -> list[int]:
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def chat_steps(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        *,
        max_characters: int | None = None,
        max_tokens: int | None = None,
        add_special_tokens: bool = False,
    ) -> EncodingSteps[list[int]]:
        """Run `encode_chat` in steps. Raises TooLongError about `messages`."""
        text = yield from self._template(variables).render_steps(
            messages, variables, max_characters
        )
        (ids,) = yield from self.encode_steps(
            [text], param="messages", max_tokens=max_tokens, add_special_tokens=add_special_tokens
        )
        return ids

    def _template(self, variables: Mapping[str, object]) -> ChatTemplate:
        template = self._tools_chat if variables.get("tools") else self._chat
        if template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions instead", "messages"
            )
        return template

    def continuation_steps(
        self,
        pairs: Sequence[tuple[str, Sequence[str]]],
        *,
        param: str,
        max_tokens: int | None = None,
    ) -> EncodingSteps[list[tuple[list[int], list[list[int]]]]]:
        """Encode prompts and, for each, its continuations; in steps as `encode_steps`.

        The rule of lm-eval: white space at the end of the prompt belongs to the continuation, and
        a continuation is encode(prompt + continuation) without its first len(encode(prompt)) ids.
        If the prompt's ids show that its last line or words are encoded alike by themselves, only
        these are encoded again, once for all prompts with the same end.
        """
        stems = [prompt.rstrip() for prompt, _ in pairs]
        prompt_ids = yield from self.encode_steps(stems, param=param, max_tokens=max_tokens)
        ends = [tokenization_suffix(stem) for stem in stems]
        known = self._encode_distinct(ends)
        heads = [
            end if end and ids[-len(known[end]) :] == known[end] else None
            for end, ids in zip(ends, prompt_ids, strict=True)
        ]
        following_texts = [
            [prompt[len(stem) :] + text for text in continuations]
            for stem, (prompt, continuations) in zip(stems, pairs, strict=True)
        ]
        short = [
            head + text
            for head, texts in zip(heads, following_texts, strict=True)
            if head is not None
            for text in texts
        ]
        known |= self._encode_distinct(short)
        results = []
        for head, stem, ids, texts in zip(heads, stems, prompt_ids, following_texts, strict=True):
            if head is None:
                follow = yield from self._encode_after(stem, len(ids), texts)
            else:
                follow = [known[head + text][len(known[head]) :] for text in texts]
            results.append((ids, follow))
        return results

    def _encode_after(
        self, stem: str, skip: int, texts: Sequence[str]
    ) -> EncodingSteps[list[list[int]]]:
        """Encode texts behind `stem` as a whole, a piece of texts at a time."""
        follow: list[list[int]] = []
        for piece in pieces_of(stem + text for text in texts):
            follow += [ids[skip:] for ids in self.encode_many(piece)]
            yield 0
        return follow

    def _encode_distinct(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Return ids without special tokens. Those of short texts are cached."""
        cache = self._ids_cache
        ids = {text: cache[text] for text in texts if text in cache}
        new = [text for text in dict.fromkeys(texts) if text not in ids]
        ids |= zip(new, self.encode_many(new, add_special_tokens=False), strict=True)
        if len(cache) > MAX_CACHED_TEXTS:
            self._ids_cache = {}
        self._ids_cache |= {text: ids[text] for text in new if len(text) <= SUFFIX_CHARACTERS}
        return ids

    @functools.cached_property
    def longest_token_characters(self) -> int:
        """Upper bound of the characters of a token."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        longest = max(map(len, vocabulary), default=1)
        return longest * (1 if self._backend.normalizer is None else NORMALISED_CHARACTERS)

    # ---- ids to text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def detokenizer(
        self, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> Detokenizer:
        """Return a new incremental decoder for one stream of tokens.

        after: ids of the prompt that the stream continues.
        """
        made: Detokenizer
        if self._byte_level:
            made = ByteDetokenizer(self._shown_bytes if skip_special_tokens else self.token_bytes)
        else:
            made = WindowDetokenizer(
                functools.partial(self.decode, skip_special_tokens=False),
                self._fallback_byte,
                self._is_shown if skip_special_tokens else self._is_known,
            )
        made.skip(after[-CONTEXT_TOKENS:])
        return made

    @functools.cached_property
    def special_texts(self) -> dict[int, str]:
        """Texts of special tokens, by id."""
        return {token_id: self.token_text(token_id) for token_id in self._special_ids}

    @functools.cached_property
    def _bytes_of_character(self) -> dict[str, int]:
        return {character: byte for byte, character in byte_level_alphabet().items()}

    def token_text(self, token_id: int) -> str:
        """Return the token as in the vocabulary; empty outside the vocabulary."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" outside the vocabulary."""
        known = self._bytes_cache.get(token_id)
        if known is None:
            known = self._bytes_cache[token_id] = self._read_bytes(token_id)
        return known

    def _read_bytes(self, token_id: int) -> bytes:
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


SUFFIX_CHARACTERS = 64


def tokenization_suffix(stem: str) -> str:
    """Return the end of `stem` that is tokenised independently of what precedes it, or "".

    That is a short last line, or the last SUFFIX_CHARACTERS up to a space between a word and a
    letter: no word tokenizer looks across either.
    """
    line = stem.rfind("\n") + 1
    if line > 0 and len(stem) - line <= SUFFIX_CHARACTERS // 2 and stem[line : line + 1].isalpha():
        return stem[line:]
    at = len(stem) - SUFFIX_CHARACTERS
    while (at := stem.rfind(" ", SUFFIX_CHARACTERS, at)) > 0:
        if stem[at - 1].isalnum() and stem[at + 1].isalpha():
            return stem[at:]
    return ""
