"""Token ids to text incrementally, without broken characters, at linear cost.

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
from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"


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
        if self._pending and REPLACEMENT not in self._decode(self._pending):
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
