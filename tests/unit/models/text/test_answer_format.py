"""Answer formats: the fields of an answer do not depend on how its text is split."""

from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.text.answer_format import (
    HARMONY_PROMPT,
    HARMONY_TAGS,
    THINK,
    AnswerFormat,
    AnswerParser,
    AnswerPiece,
    CallListParser,
    NamedCallParser,
    find_format,
)

HERMES = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
MISTRAL = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]
DEEPSEEK = [
    *("<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
]
KIMI = [
    *("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
]
TOOLS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    "say": {"properties": {"s": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
}
QUOTED = '{"name": "say", "arguments": {"s": "\\"%s"}}'
MARKED = f"<tool_call>{QUOTED}</tool_call>"
HEAD = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = [("add", '{"a":1}')]
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
PAIRS = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>"
)
TYPED = [("add", '{"a":1,"s":"2"}')]
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a":1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
V31 = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a":1}<｜tool▁call▁end｜>'
K2 = '<|tool_call_begin|>functions.add:%d<|tool_call_argument_begin|>{"a":1}<|tool_call_end|>'
K2_CALLS = f"<|tool_calls_section_begin|>{K2 % 0}{K2 % 1}<|tool_calls_section_end|>"
# tags, end of the prompt, answer, its content, reasoning and calls
ANSWERS: list[tuple[list[str], str, str, str, str, list[tuple[str, str]]]] = [
    (HERMES, "", "<think>\nHm.\n</think>\n\nYes. ", "Yes. ", "Hm.", []),
    (HERMES, "<think>\n", "Hm.</think>Yes.", "Yes.", "Hm.", []),
    (HERMES, "<think>\n", "never closed \n", "", "never closed", []),
    (HERMES, "", " plain <think> text \n", " plain <think> text \n", "", []),
    (HERMES, "", "<think></think>\n", "", "", []),
    (HERMES, "", f"<think>Hm.</think>\nI add.\n{CALL}\n{CALL}", "I add.", "Hm.", [*ADD, *ADD]),
    (HERMES, "<think>", f"{CALL} is how</think>", "", f"{CALL} is how", []),
    (HERMES, "", XML, "", "", TYPED),
    (HERMES, "", PAIRS, "", "", TYPED),
    (HERMES, "", CALL[:30], CALL[:30], "", []),
    (HERMES, "", f"{CALL} and {CALL}", "and", "", [*ADD, *ADD]),
    *[
        (HERMES, "", f"{MARKED % mark}{CALL}", "", "", [("say", f'{{"s":"\\"{mark}"}}'), *ADD])
        for mark in ("</tool_call>", "<tool_call>", "<arg_key>", "[ARGS]", "<think> 😀")
    ],
    (HERMES, "", '<tool_call>{"a": "</tool_call> b', '<tool_call>{"a": "</tool_call> b', "", []),
    (HERMES, "", CALL.replace('{"a": 1}', "null"), "", "", [("add", "{}")]),
    *[
        (
            HERMES,
            "",
            PAIRS.replace("add", "say").replace(">2<", f">{text}<"),
            "",
            "",
            [("say", made)],
        )
        for text, made in (("2", '{"a":1,"s":"2"}'), ("null", '{"a":1,"s":null}'))
    ],
    (HERMES, "", "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", "", []),
    (MISTRAL, "", '[TOOL_CALLS][{"name":"add","arguments":{"a":1}}]', "", "", ADD),
    (MISTRAL, "", '[TOOL_CALLS]add[ARGS]{"a":1}', "", "", ADD),
    (
        MISTRAL,
        "",
        'Hm.[TOOL_CALLS]add[CALL_ID]1[ARGS]{"a":1}[TOOL_CALLS]add[ARGS]{"a":1}',
        "Hm.",
        "",
        [*ADD, *ADD],
    ),
    (
        MISTRAL,
        "",
        f"[TOOL_CALLS][{QUOTED % '[TOOL_CALLS]'}]",
        "",
        "",
        [("say", '{"s":"\\"[TOOL_CALLS]"}')],
    ),
    (MISTRAL, "", '[TOOL_CALLS][{"name":"ad', '[TOOL_CALLS][{"name":"ad', "", []),
    (DEEPSEEK, "", f"Hm.{V3}", "Hm.", "", ADD),
    (DEEPSEEK, "<think>", f"Hm.</think>{V31}", "", "Hm.", ADD),
    (KIMI, "", f"Hm.{K2_CALLS}", "Hm.", "", [*ADD, *ADD]),
    (
        KIMI,
        "<think>",
        f"Hm.</think>{(K2 % 0).replace('1}', '')}",
        (K2 % 0).replace("1}", ""),
        "Hm.",
        [],
    ),
    ([*HARMONY_TAGS], "<|start|>assistant", "not the format", "not the format", "", []),
    ([*HARMONY_TAGS], "", f"{HEAD}<|channel|>final<|message|>Yes.", None, "", []),  # type: ignore[list-item]
    *[
        ([*HARMONY_TAGS], "<|start|>assistant", head + "x" * 300, head + "x" * 300, "", [])
        for head in ("", "<|channel|>final ")
    ],
    *[
        ([*HARMONY_TAGS], "<|start|>assistant", HEAD + rest, content, "Hm.", calls)
        for rest, content, calls in (
            ("<|channel|>final<|message|> Yes. ", " Yes. ", []),
            ("<|channel|>commentary<|message|>I add.<|end|>", "I add.", []),
            ('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1}', "", ADD),
            (' to=functions.add<|channel|>commentary json<|message|>{"a":1}', "", ADD),
            ("<|channel|>fin", "", []),
            (
                '<|channel|>commentary to=functions.say<|message|>{"s":"<|end|> \\"<|start|>"}'
                "<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
                "Yes.",
                [("say", '{"s":"<|end|> \\"<|start|>"}')],
            ),
            ('<|channel|>commentary to=functions.add<|message|>{"a', "", [("add", '{"a')]),
        )
    ],
]


def read(form: AnswerFormat, prompt_end: str, parts: list[str]) -> Any:
    """Return (content, reasoning, calls); content None if the answer has no format."""
    new_parser = form.new_parser(prompt_end, TOOLS)
    if new_parser is None:
        return None, "", []
    parser = new_parser()
    pieces: list[AnswerPiece] = []
    for part in parts:
        pieces += parser.push(part)
    pieces += parser.flush()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append((piece.name, piece.text))
        elif piece.field == "call":
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    texts = {field: "".join(p.text for p in pieces if p.field == field) for field in FIELDS}
    return texts["content"], texts["reasoning"], calls


FIELDS = ("content", "reasoning")


@pytest.mark.parametrize(
    ("tags", "prompt_end", "text", "content", "reasoning", "calls"),
    ANSWERS,
    ids=[answer[2][:30] for answer in ANSWERS],
)
def test_fields_of_answer_however_it_is_split(
    tags: list[str],
    prompt_end: str,
    text: str,
    content: str | None,
    reasoning: str,
    calls: list[tuple[str, str]],
) -> None:
    form = find_format([*tags, "<|other|>"])
    for size in (1, 2, 7, len(text)):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(form, prompt_end, parts) == (content, reasoning, calls)


@given(parts=st.lists(st.sampled_from([*HERMES, "<", "<th", "ink>", " ", "\n", "a", "[", "{"])))
def test_no_text_is_lost_or_made_up(parts: list[str]) -> None:
    whole = read(find_format(HERMES), "", ["".join(parts)])
    letters = "".join(parts).count("a")
    assert sum(text.count("a") for text in (*whole[:2], *map(str, whole[2]))) == letters


MARKS = [*HERMES, *MISTRAL, *DEEPSEEK, *KIMI, "<｜tool▁sep｜>", *HARMONY_TAGS]
TEXTS = ['{"a": "', "}", "\\", '"', " ", "\n", "<", "a", "final", " to=functions.add", "x" * 250]
WORDS = [*MARKS, *TEXTS, XML, PAIRS, V3, HEAD, CALL]
FORMATS = [find_format(tags) for tags in (HERMES, MISTRAL, DEEPSEEK, KIMI, HARMONY_TAGS)]
KINDS = product(FORMATS, ("", THINK, HARMONY_PROMPT), (TOOLS, {}), (False, True))
PARSERS: list[Callable[[], AnswerParser]] = [
    *(made for form, *how, on in KINDS if (made := form.new_parser(*how, continues=on))),
    partial(NamedCallParser, "add"),
    CallListParser,
]


@settings(deadline=None)
@given(parser=st.sampled_from(PARSERS), words=st.lists(st.sampled_from(WORDS)), data=st.data())
def test_pieces_do_not_depend_on_split(
    parser: Callable[[], AnswerParser], words: list[str], data: st.DataObject
) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parts = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    assert joined(parser(), parts) == joined(parser(), list(text)) == joined(parser(), [text])


def joined(parser: AnswerParser, parts: list[str]) -> list[AnswerPiece]:
    """Return the pieces of an answer in order; pieces of the same text are joined."""
    pieces: list[AnswerPiece] = []
    for piece in (*chain.from_iterable(map(parser.push, parts)), *parser.flush()):
        if pieces and piece.name is None and pieces[-1].field == piece.field:
            last = pieces.pop()
            piece = last._replace(text=last.text + piece.text)
        pieces.append(piece)
    return pieces


def test_model_without_added_tokens_has_no_format() -> None:
    form = find_format(["<|im_end|>"])
    assert not form.tags
    assert form.new_parser("<think>", TOOLS) is None
