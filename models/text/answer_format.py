"""Formats in which model families write reasoning, content and tool calls, parsed as they stream.

    harmony    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final
               <|message|>CONTENT, with a call as <|channel|>commentary to=functions.NAME
               <|message|>ARGUMENTS (gpt-oss)
    think      <think>REASONING</think>CONTENT (Qwen3, DeepSeek-R1, GLM, MiniMax); the prompt may
               end with <think>
    calls      <tool_call>{"name": NAME, "arguments": {...}}</tool_call> and its XML variants
               (Qwen, GLM), [TOOL_CALLS] (Mistral), <｜tool▁call▁begin｜> (DeepSeek),
               <|tool_call_begin|> (Kimi-K2)

A parser receives text in which the tags of its format are shown. What is not in the format is
content, unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

MAX_HEADER_CHARACTERS = 256  # of a harmony message; more is not a header
THINK, END_THINK = "<think>", "</think>"
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
HARMONY_PROMPT = "<|start|>assistant"
ANY_TEXT, BREAKS = "/(?s:.*)/", r"/\n{0,2}/"
HARMONY_REASONING = (
    f'( <|channel|> "analysis" <|message|> {ANY_TEXT} <|end|> <|start|> "assistant" )*'
    ' <|channel|> "final" <|message|>'
)
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")

Schemas = Mapping[str, Mapping[str, Any]]  # parameters of each tool
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_FENCE = re.compile(r"\s*```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)


class AnswerPiece(NamedTuple):
    """A part of one field of an answer. name: of the tool call that begins with this piece."""

    field: Literal["content", "reasoning", "call"]
    text: str
    name: str | None = None


class CallFormat(NamedTuple):
    """Tags around a tool call. end: None if calls go to the next one or to the end.

    inner: tags in a call. silent: tags without a meaning.
    """

    begin: str
    end: str | None
    inner: Sequence[str] = ()
    silent: Sequence[str] = ()


CALL_FORMATS = (
    CallFormat("<tool_call>", "</tool_call>"),
    CallFormat("[TOOL_CALLS]", None, ("[CALL_ID]", "[ARGS]")),
    CallFormat(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        ("<｜tool▁sep｜>",),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    CallFormat(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        ("<|tool_call_argument_begin|>",),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
)


class AnswerFormat(NamedTuple):
    """The format of a model. calls: None if it has no format of tool calls."""

    is_harmony: bool
    thinks: bool
    calls: CallFormat | None

    @property
    def has_calls(self) -> bool:
        return self.is_harmony or self.calls is not None

    @property
    def tags(self) -> list[str]:
        if self.is_harmony:
            return list(HARMONY_TAGS)
        calls = self.calls
        ends = [] if calls is None or calls.end is None else [calls.end]
        return [
            *((THINK, END_THINK) if self.thinks else ()),
            *((calls.begin, *ends, *calls.inner, *calls.silent) if calls else ()),
        ]

    def reasoning(self, prompt_end: str, tag_ids: Mapping[str, int]) -> str:
        """Return, as the start of a Lark rule, what precedes an answer that has a grammar.

        Empty if nothing may precede it. prompt_end: the last characters of the prompt.
        """
        if self.is_harmony and prompt_end.endswith(HARMONY_PROMPT):
            parts = HARMONY_REASONING.split(" ")
        elif self.thinks and prompt_end.rstrip().endswith(THINK):
            parts = [ANY_TEXT, END_THINK, BREAKS]
        elif self.thinks and not prompt_end.rstrip().endswith(END_THINK):
            parts = ["(", THINK, ANY_TEXT, END_THINK, BREAKS, ")?"]
        else:
            return ""
        return " ".join(f"<[{tag_ids[part]}]>" if part in tag_ids else part for part in parts)

    def new_parser(
        self, prompt_end: str, tools: Schemas, *, continues: bool = False
    ) -> Callable[[], AnswerParser] | None:
        """Return the constructor of an answer's parser, or None if the answer is content.

        prompt_end: the last characters of the prompt, or `open_tag` of a text that the answer
        continues. tools: empty if calls are not expected.
        """
        if self.is_harmony:
            return HarmonyParser if prompt_end.endswith(HARMONY_PROMPT) else None
        if not self.thinks and not (self.calls and tools):
            return None
        is_open = self.thinks and prompt_end.rstrip().endswith(THINK)
        return partial(ThinkParser, self, is_open=is_open, tools=tools, continues=continues)


def open_tag(text: str) -> str:
    """Return the tag that applies at the end of an answer's first part."""
    return THINK if text.rfind(THINK) > text.rfind(END_THINK) else END_THINK


def find_format(added_tokens: Collection[str]) -> AnswerFormat:
    """Return the format that a tokenizer's added tokens stand for."""
    found = [calls for calls in CALL_FORMATS if calls.begin in added_tokens]
    return AnswerFormat(
        is_harmony={*HARMONY_TAGS} <= {*added_tokens},
        thinks={THINK, END_THINK} <= {*added_tokens},
        calls=found[0] if found else None,
    )


def partial_match(text: str, whole: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `whole`."""
    for length in range(min(len(whole) - 1, len(text)), 0, -1):
        if text.endswith(whole[:length]):
            return length
    return 0


class TagParser:
    """AnswerParser of text with tags. `flush` is called once, at the end of the answer.

    A text that may begin a tag is held back.
    """

    def __init__(self, tags: Sequence[str]) -> None:
        self._tags = tuple(tags)
        self._pattern = re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))
        self._held = ""

    def push(self, text: str) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        buffer, start = self._held + text, 0
        for match in self._pattern.finditer(buffer):
            if match.start() > start:
                pieces += self._on_text(buffer[start : match.start()])
            pieces += self._on_tag(match[0])
            start = match.end()
        rest = buffer[start:]
        shown = len(rest) - max(partial_match(rest, tag) for tag in self._tags)
        pieces += self._on_text(rest[:shown]) if shown else ()
        self._held = rest[shown:]
        return [piece for piece in pieces if piece.text or piece.name]

    def flush(self) -> list[AnswerPiece]:
        pieces = [*(self._on_text(self._held) if self._held else ()), *self._on_end()]
        return [piece for piece in pieces if piece.text or piece.name]

    def _on_tag(self, tag: str) -> Sequence[AnswerPiece]:
        raise NotImplementedError

    def _on_text(self, text: str) -> Sequence[AnswerPiece]:
        raise NotImplementedError

    def _on_end(self) -> Sequence[AnswerPiece]:
        return ()


class HarmonyParser(TagParser):
    """Parser of gpt-oss's channels. The prompt ends inside the header of the first message."""

    def __init__(self) -> None:
        super().__init__(HARMONY_TAGS)
        self._header: str | None = ""
        self._field: Literal["content", "reasoning", "call"] = "content"
        self._has_reasoning = False
        self._arguments = ""  # of a call

    def _on_tag(self, tag: str) -> Sequence[AnswerPiece]:
        if self._header is None and self._field == "call" and in_string(self._arguments):
            return self._on_text(tag)
        if tag == "<|start|>":
            self._header = ""
        elif tag == "<|message|>" and self._header is not None:
            return self._begin_message()
        elif self._header is not None:
            self._header += tag
        elif tag == "<|end|>":
            self._field = "content"
        return ()

    def _begin_message(self) -> Sequence[AnswerPiece]:
        header, self._header = self._header or "", None
        _, _, channel = header.partition("<|channel|>")
        called = _RECIPIENT.search(header)
        if called:
            self._field, self._arguments = "call", ""
            return [AnswerPiece("call", "", called[1])]
        is_shown = channel.startswith(("final", "commentary")) or not channel
        self._field = "content" if is_shown else "reasoning"
        if is_shown or not self._has_reasoning:
            self._has_reasoning = self._has_reasoning or not is_shown
            return ()
        return [AnswerPiece("reasoning", "\n")]

    def _on_text(self, text: str) -> Sequence[AnswerPiece]:
        if self._header is None:
            self._arguments += text if self._field == "call" else ""
            return [AnswerPiece(self._field, text)]
        self._header += text
        if len(self._header) <= MAX_HEADER_CHARACTERS:
            return ()
        shown, self._header, self._field = self._header, None, "content"
        return [AnswerPiece("content", shown)]

    def _on_end(self) -> Sequence[AnswerPiece]:
        """Show a header that none is: the answer is not in the format."""
        header, self._header = self._header or "", None
        return () if "<|channel|>" in header else [AnswerPiece("content", header)]


class ThinkParser(TagParser):
    """Parser of <think> and of tool calls. is_open: the prompt ends with <think>.

    continues: the prompt ends with the first part of the answer.
    """

    def __init__(
        self, form: AnswerFormat, *, is_open: bool, tools: Schemas, continues: bool
    ) -> None:
        super().__init__(form.tags)
        self._calls = form.calls if tools else None
        self._tools = tools
        self._is_reasoning = is_open
        self._trims = is_open and not continues  # white space behind a tag
        self._space = ""  # held back: dropped before a tag
        self._has_started = continues
        self._body: str | None = None  # of a tool call

    def _on_tag(self, tag: str) -> Sequence[AnswerPiece]:
        calls = self._calls
        if self._body is not None and calls is not None:
            if tag != (calls.end or calls.begin) or in_string(self._body):
                return self._on_text(tag)
            pieces = self._end_call()
            self._body = "" if calls.end is None else None
            return pieces
        if tag == THINK and not self._has_started and not self._is_reasoning:
            self._is_reasoning = self._trims = True
        elif tag == END_THINK and self._is_reasoning:
            self._is_reasoning, self._trims = False, True
        elif calls is None or self._is_reasoning or tag not in (calls.begin, *calls.silent):
            return self._on_text(tag)
        elif tag == calls.begin:
            self._body = ""
        self._space = ""
        return ()

    def _on_text(self, text: str) -> Sequence[AnswerPiece]:
        if self._body is not None:
            self._body += text
            return ()
        if self._trims:
            text = text.lstrip()
        if not text:
            return ()
        shown = text.rstrip()
        if not shown:
            self._space += text
            return ()
        self._trims, self._has_started = False, True
        held, self._space = self._space, text[len(shown) :]
        return [AnswerPiece("reasoning" if self._is_reasoning else "content", held + shown)]

    def _end_call(self) -> Sequence[AnswerPiece]:
        body, self._body = self._body or "", None
        self._trims = self._has_started = True
        calls = read_calls(body, self._tools)
        if calls:
            return [AnswerPiece("call", arguments, name) for name, arguments in calls]
        form = self._calls
        assert form is not None
        return [AnswerPiece("content", f"{form.begin}{body}{form.end or ''}")]

    def _on_end(self) -> Sequence[AnswerPiece]:
        """Show a call that is cut; calls without an end tag are complete."""
        if self._body is None:
            space = "" if self._is_reasoning or self._trims else self._space
            return [AnswerPiece("content", space)]
        form = self._calls
        assert form is not None
        if form.end is None:
            return self._end_call()
        return [AnswerPiece("content", form.begin + self._body)]


def in_string(text: str) -> bool:
    """Return whether JSON that begins in `text` ends within a string."""
    start = min((at for mark in "{[" if (at := text.find(mark)) >= 0), default=len(text))
    if text.lstrip().startswith("<function=") or "<arg_key>" in text[:start]:
        return False
    return '"' in _STRING.sub("", text[start:])


def read_calls(body: str, tools: Schemas) -> list[tuple[str, str]]:
    """Return (name, arguments as JSON) of each call between the tags; none if it is malformed."""
    text = body.strip()
    if text.startswith(("{", "[")) and (calls := _json_calls(text)):
        return calls
    if (function := _FUNCTION.match(text)) is not None:
        name = function[1].strip()
        return [(name, _typed(_PARAMETER.findall(function[2]), tools.get(name, {})))]
    if "<arg_key>" in text:
        name = text.partition("<arg_key>")[0].strip()
        return [(name, _typed(_PAIR.findall(text), tools.get(name, {})))]
    call_id, found, rest = text.partition("<|tool_call_argument_begin|>")
    if found:  # Kimi-K2: functions.NAME:NUMBER
        return _separated(call_id.partition(":")[0].rpartition(".")[2], rest)
    for separator in ("<｜tool▁sep｜>", "[ARGS]"):
        head, found, rest = text.partition(separator)
        if found:
            return _separated(head, rest)
    return []


def _separated(head: str, rest: str) -> list[tuple[str, str]]:
    name, arguments = head.partition("[CALL_ID]")[0].strip(), rest.strip()
    if name == "function":  # DeepSeek-V3: function<sep>NAME\n```json\n...\n```
        name, _, arguments = arguments.partition("\n")
    fence = _FENCE.fullmatch(arguments)
    arguments = fence[1] if fence else arguments.strip()
    return [(name.strip(), arguments)] if _loads(arguments) is not None else []


def _json_calls(text: str) -> list[tuple[str, str]]:
    tree = _loads(text)
    calls = []
    for each in tree if isinstance(tree, list) else [tree]:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return []
        arguments = each.get("arguments", each.get("parameters"))
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        calls.append((each["name"], arguments))
    return calls


def _typed(pairs: Sequence[tuple[str, str]], schema: Mapping[str, Any]) -> str:
    """Return arguments as JSON. Values are text; what the schema does not call a string is JSON."""
    properties = schema.get("properties")
    values: dict[str, Any] = {}
    for key, text in pairs:
        stated = properties.get(key.strip()) if isinstance(properties, dict) else None
        kinds = _types(stated)
        is_text = "string" in kinds and not ("null" in kinds and text.strip() == "null")
        value = None if is_text else _loads(text.strip())
        values[key.strip()] = (
            text if value is None and (is_text or text.strip() != "null") else value
        )
    return msgspec.json.encode(values).decode()


def _types(schema: Any) -> set[Any]:
    """Return the types that a schema, or an alternative of it, names."""
    if not isinstance(schema, dict):
        return set()
    stated = schema.get("type")
    found = {
        *filter(
            lambda each: isinstance(each, str), stated if isinstance(stated, list) else [stated]
        )
    }
    for key in ("anyOf", "oneOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            found |= _types(each)
    return found


def _loads(text: str) -> Any:
    """Return the JSON value, or None if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


class NamedCallParser:
    """AnswerParser of the arguments of one call, and nothing else."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[AnswerPiece]:
        if not text:
            return []
        name, self._name = self._name, None
        return [AnswerPiece("call", text, name)]

    def flush(self) -> list[AnswerPiece]:
        return []


class CallListParser:
    """AnswerParser of a JSON list of calls."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> list[AnswerPiece]:
        self._text += text
        return []

    def flush(self) -> list[AnswerPiece]:
        calls = read_calls(self._text, {})
        if not calls:  # it is cut
            return [AnswerPiece("content", self._text)]
        return [AnswerPiece("call", arguments, name) for name, arguments in calls]


AnswerParser = TagParser | NamedCallParser | CallListParser
