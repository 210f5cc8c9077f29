"""Reasoning and tool calls of a chat, with the `openai` client and a scripted rank."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cluster.http.chat import _template_message
from cluster.http.cost import MemoryBudget
from cluster.http.schemas import ChatMessage
from contracts.config import LimitsConfig
from models.text.grammar import grammar_tokenizer, new_matcher
from tests.support.api_harness import MODEL, Api, refused, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.tiny_tokenizer import EOS, write_byte_level

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role + ':' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<' + c.function.name }}"
    "{% for key, value in c.function.arguments | items %}{{ ' ' + key + '=' + value | string }}"
    "{% endfor %}{{ ' ' + c.function.arguments + ' ' + c.function.arguments | tojson + '>' }}"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ START }}{% endif %}"
)
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
USER: Any = [{"role": "user", "content": "Add."}]


def added(texts: tuple[str, ...], *, special: bool) -> dict[str, Any]:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {str(420 + n): {"content": text, **flags} for n, text in enumerate(texts)}


@pytest.fixture(scope="module", params=["think", "harmony"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    is_harmony = request.param == "harmony"
    start = "'<|start|>assistant'" if is_harmony else "'assistant:'"
    folder = write_byte_level(
        tmp_path_factory.mktemp("tokenizer"),
        chat_template=TEMPLATE.replace("START", start),
        added_tokens_decoder=added(HARMONY if is_harmony else TAGS, special=is_harmony),
    )
    with serve_api(folder, [FakeRank("attention-0", lambda submit: [])]) as api:
        yield api


def answer(api: Api, text: str, messages: Any = USER, **fields: Any) -> tuple[Any, Any]:
    """Return the message and finish reason; a stream of one-token frames adds up to the same."""
    reply = api.tokenizer.encode(text + EOS)
    api.rank.reply = lambda submit: reply
    create = api.openai.chat.completions.create
    whole = create(model=MODEL, messages=messages, **fields).choices[0]
    message = whole.message.model_dump(exclude_none=True)
    chunks = list(create(model=MODEL, messages=messages, stream=True, **fields))
    streamed: dict[str, Any] = {}
    for chunk in chunks:
        for name, value in chunk.choices[0].delta.model_dump(exclude_none=True).items():
            if name != "tool_calls":
                streamed[name] = streamed.get(name, "") + value
                continue
            for call in value:
                calls = streamed.setdefault(name, [])
                if call.get("id"):
                    assert call.pop("index") == len(calls)
                    calls.append(call)
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    for found in (message, streamed):
        found["tool_calls"] = [
            (call["function"]["name"], call["function"]["arguments"].replace(" ", ""))
            for call in found.get("tool_calls", [])
        ]
        found["content"] = found.get("content") or None
    assert streamed == message
    return message, whole.finish_reason


def texts_of(api: Api) -> tuple[str, str, str]:
    """Return an answer with reasoning, one that also calls, and one that calls twice."""
    if not api.tokenizer.answer_format.is_harmony:
        return ("<think>\nHm.\n</think>\n\nYes.", f"<think>Hm.</think>{CALL}", CALL + CALL)
    head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    twice = f"{call}<|end|><|start|>assistant{call}"
    return f"{head}<|channel|>final<|message|>Yes.", head + call, twice


def test_reasoning_and_calls_are_fields_of_their_own(api: Api) -> None:
    plain, calling, twice = texts_of(api)
    message, reason = answer(api, plain)
    assert (message["content"], message["reasoning_content"], reason) == ("Yes.", "Hm.", "stop")
    call = ("add", '{"a":1}')
    message, reason = answer(api, calling, tools=[ADD])
    assert (message["tool_calls"], reason) == ([call], "tool_calls")
    assert message["reasoning_content"] == "Hm."
    assert message["content"] is None
    message, _ = answer(api, twice, tools=[ADD])
    assert message["tool_calls"] == [call, call]
    message, _ = answer(api, twice, tools=[ADD], parallel_tool_calls=False)
    assert message["tool_calls"] == [call]


def test_cut_call_and_stop_at_a_tag(api: Api) -> None:
    _, calling, _ = texts_of(api)
    cut = len(api.tokenizer.encode(calling)) - 2
    message, reason = answer(api, calling, tools=[ADD], max_tokens=cut)
    assert reason == "length"
    assert "add" in str(message)
    tag = "<|channel|>" if api.tokenizer.answer_format.is_harmony else "<think>"
    message, reason = answer(api, calling, stop=[tag])
    assert (message["content"], reason) == (None, "stop")


def test_answer_with_a_grammar_follows_free_reasoning(api: Api) -> None:
    answered = '{"a":1}'
    whole, _, _ = texts_of(api)
    replies = [whole.replace("Yes.", answered).replace("Hm.", 'Hm, {"b')]
    is_harmony = api.tokenizer.answer_format.is_harmony
    if not is_harmony:
        replies.append(answered)
    structure: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for reply in replies:
        fields = {"guided_json": {**structure, "additionalProperties": False, "required": ["a"]}}
        api.received()
        message, reason = answer(api, reply, extra_body=fields)
        assert (message["content"], reason) == (answered, "stop")
        assert message.get("reasoning_content") == (None if reply == answered else 'Hm, {"b')
        sampling = api.rank.submits.get().sampling
        assert sampling
        grammar = sampling.grammar or ""
        library = grammar_tokenizer(api.tokenizer.to_json(), api.eos)
        for text, fits in ((reply, True), (reply.replace("1", "x"), False), ("Hm.", False)):
            matcher, ids = new_matcher(library, grammar), api.tokenizer.encode(text)
            accepted = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert accepted == fits, text


def test_earlier_call_is_a_mapping_and_text_for_the_template(api: Api) -> None:
    def prompt_of(arguments: Any, **fields: Any) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        api.received()
        body = {"messages": [*messages, {"role": "tool", "content": "3"}], "max_tokens": 1}
        assert api.post("/v1/chat/completions", **body, **fields).status_code == 200
        return api.tokenizer.decode(api.rank.submits.get().token_ids, False)

    text = '{"a":1, "b": "x"}'
    prompt = prompt_of(text, tools=[ADD])
    assert f'<add a=1 b=x {text} {{"a": 1, "b": "x"}}>' in prompt
    assert prompt.startswith('{"type": "function", "function": {"name": "add"')
    assert "function" not in prompt_of(text, tools=[ADD], tool_choice="none")
    other = {"type": "function", "function": {"name": "other"}}
    for choice in ("always", {}, other):
        fields = {"messages": USER, "tools": [ADD], "tool_choice": choice}
        refused(api.post("/v1/chat/completions", **fields), 400, "tool_choice", "one of the tools")


def test_answer_continues_last_message_in_its_field(api: Api) -> None:
    cases = [
        ("<think>Hm", " so</think>Yes.", " so", "Yes."),
        ("<think>Hm</think>Yes", " and <think> no", None, " and <think> no"),
        ("Yes", f" I add.{CALL}", None, " I add."),
    ]
    if api.tokenizer.answer_format.is_harmony:
        cases = [("<|channel|>final<|message|>Yes", " and no.", None, " and no.")]
    fields: Any = {"continue_final_message": True, "add_generation_prompt": False}
    for text, reply, reasoning, content in cases:
        last: Any = {"role": "assistant", "content": [{"type": "text", "text": text}]}
        message, _ = answer(api, reply, [*USER, last], tools=[ADD], extra_body=fields)
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
        assert len(message["tool_calls"]) == (CALL in reply)
        ids = api.received()[-1].token_ids
        assert api.tokenizer.decode(ids, False).endswith(f"assistant:{text}")


@pytest.mark.parametrize("content", ["", "Yes."])
@pytest.mark.parametrize("calls", [[], [{"function": {"name": "add", "arguments": "{}"}}]])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_template_gets_reasoning_by_all_names(name: str, calls: list[Any], content: str) -> None:
    """The template of gpt-oss refuses content and thinking beside calls."""
    given = {"role": "assistant", "content": content, "tool_calls": calls, name: "Hm."}
    account = MemoryBudget(LimitsConfig()).open()
    message = _template_message(0, msgspec.convert(given, ChatMessage), account)
    assert (message["reasoning_content"], message["reasoning"]) == ("Hm.", "Hm.")
    assert message.get("thinking") == (None if calls and content else "Hm.")
    assert ("tool_calls" in message) == bool(calls), "templates take an empty list for calls"
