"""Structured output over HTTP, with real ranks of the bundled model."""

import asyncio
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cluster.fleet.model_folder import resolve_model_folder
from cluster.http import grammar_compiler
from contracts.config import BUNDLED
from contracts.errors import OverloadError
from contracts.requests import Caller, Sampling
from models.text.grammar import CompileAnswer, CompileRequest, grammar_of
from models.text.tokenizer import Tokenizer
from tests.support.api_harness import MODEL, Api, RunningRank, refused, serve_api
from tests.support.async_tests import run_async
from tests.support.fake_rank import TOKEN
from tests.support.group_harness import ThreadGroup, group_config, loop_of, rank_of
from tests.support.local_group import LocalGroup

pytestmark = pytest.mark.long

FOLDER = Path(resolve_model_folder(BUNDLED))
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NODE = {
    "type": "object",
    "properties": {"value": DIGIT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    DIGIT,
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 999},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 3},
    {"enum": ["a", "b", 1, None, True, {"x": [1]}]},
    {"const": {"x": [1, "größer 😀"]}},
    {"type": "string", "maxLength": 5},
    {"type": "string", "pattern": "^[a-z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [DIGIT, {"type": "boolean"}], "items": False, "minItems": 2},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": DIGIT, "maxItems": 2}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "additionalProperties": False},
    {"type": "object", "additionalProperties": DIGIT, "maxProperties": 1},
    {"type": ["string", "null"], "maxLength": 3},
    {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
            "address": {"type": "object", "properties": {"zip": DIGIT}, "required": ["zip"]},
        },
        "required": ["name", "tags", "address"],
        "additionalProperties": False,
    },
]
SUM = 'start: e\ne: t | e "+" t\nt: /[0-9]/ | "(" e ")"'


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The bundled model with a chat template that shows tools."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder)
    template = "{{ (tools or []) | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    config = group_config(kv={"pool_tokens": 16 * 1024})
    with ThreadGroup(FOLDER, config, token=TOKEN) as group:
        ready = group.attention[0].ready
        ranks: Any = [RunningRank(ready.name, ready.client_address)]
        with serve_api(folder, ranks, eos_text="<|im_end|>") as api:
            yield api


def answers(api: Api, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": "JSON: ", "max_tokens": 160, "temperature": 1.0, "n": 3, "seed": 5, **fields}
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    if "messages" in fields:
        del body["prompt"]
    response = api.post(path, **body)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_complete_answers_are_json_of_the_schema(api: Api, schema: dict[str, Any]) -> None:
    choices = answers(api, guided_json=schema)
    texts = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


POINT = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"x": {"$ref": "#/definitions/digit"}, "then": {"$ref": "#"}},
    "required": ["x"],
    "definitions": {"digit": DIGIT},
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "additionalProperties": False}
TOOLS = [{"name": "move", "parameters": POINT}, {"name": "wait", "parameters": NOTHING}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "move"])
def test_forced_answer_is_a_call_of_a_tool(api: Api, choice: str, stream: bool) -> None:
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    named = {"type": "function", "function": {"name": choice}}
    forced = {"tools": tools, "tool_choice": choice if choice == "required" else named}
    body: dict[str, Any] = {"seed": 0, "n": 8, **forced}
    body["messages"] = [{"role": "user", "content": "Go."}]
    body |= {"parallel_tool_calls": False, "max_tokens": 160, "temperature": 1.0}
    found = _streamed_calls(api, body) if stream else _whole_calls(api, body)
    assert any(reason != "length" for _, reason in found)
    for calls, reason in found:
        if reason == "length":
            continue
        assert reason == "tool_calls"
        for name, arguments in calls:
            assert choice in (name, "required")
            (tool,) = [tool for tool in TOOLS if tool["name"] == name]
            jsonschema.validate(json.loads(arguments), tool["parameters"])


Calls = tuple[list[tuple[str, str]], str]  # names and arguments, finish reason


def _whole_calls(api: Api, body: dict[str, Any]) -> list[Calls]:
    found = []
    for made in answers(api, **body):
        functions = [call["function"] for call in made["message"].get("tool_calls", [])]
        calls = [(function["name"], function["arguments"]) for function in functions]
        found.append((calls, made["finish_reason"]))
    return found


def _streamed_calls(api: Api, body: dict[str, Any]) -> list[Calls]:
    found: list[Calls] = [([], "")] * body["n"]
    for event in api.chunks("/v1/chat/completions", **body):
        (choice,) = event["choices"]
        calls, reason = found[choice["index"]]
        calls = [*calls]
        for call in choice["delta"].get("tool_calls", []):
            function = call["function"]
            if "name" in function:
                calls.append((function["name"], function["arguments"]))
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + function["arguments"])
        found[choice["index"]] = calls, choice["finish_reason"] or reason
    return found


def test_unusable_tools_are_rejected(api: Api) -> None:
    def tool(name: str, **schema: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    user = [{"role": "user", "content": "Go."}]
    two = [tool("a", **{"$defs": {"d": DIGIT}}), tool("a.b")]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"tools": [*two, tool("a.b")]}, "two are named 'a.b'"),
        ({"tools": [tool("a", properties={"x": {"type": "colour"}})]}, "at /$defs/a/properties/x"),
        ({"tools": two, "tool_choice": "auto"}, "no format of tool calls"),
    ]
    for fields, words in bad:
        body = {"messages": user, "tool_choice": "required", **fields}
        refused(api.post("/v1/chat/completions", **body), 400, "tools", words)
    body = {"messages": user, "tool_choice": "required", "tools": [tool("a")], "guided_regex": "a"}
    refused(api.post("/v1/chat/completions", **body), 400, "guided_regex", "one is enough")
    body = {"messages": user, "tool_choice": "required", "tools": [tool("a")], "min_tokens": 1}
    refused(api.post("/v1/chat/completions", **body), 400, "min_tokens", "leave min_tokens out")


def schema_field(schema: object, **more: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-f]{3}[0-9]{2,4}"}, "[a-f]{3}[0-9]{2,4}"),
        ({"guided_grammar": SUM}, r"[0-9()]+(\+[0-9()]+)*"),
        ({"guided_grammar": 'root ::= "yes" | "no" ","'}, "yes|no,"),  # llama.cpp's notation
        ({"structured_outputs": {"regex": "a{2,5}"}}, "a{2,5}"),
        ({"structured_outputs": {"json": json.dumps(DIGIT)}}, "[0-9]"),
        ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, "xy"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"json_object": True}, "max_tokens": 3}, r"\{.*"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 3}, r"\{.*"),
        ({"response_format": schema_field(DIGIT, strict=True)}, "[0-9]"),
        ({"guided_json": DIGIT, "ignore_eos": True}, "[0-9]"),
        ({"guided_regex": "a|bc", "max_tokens": 1, "logprobs": 2}, "a|bc?"),
        ({"guided_regex": "[ab]+c", "stop": "b", "logit_bias": {"5": 100}}, "a*c?"),
        ({"guided_regex": "[ab]{9}", "repetition_penalty": 1.5, "presence_penalty": 2}, "[ab]{9}"),
        ({"guided_json": DIGIT, "echo": True}, "JSON: [0-9]"),
        ({"guided_json": DIGIT, "echo": True, "max_tokens": 0}, "JSON: "),
        ({"messages": [{"role": "user", "content": "hi"}], "guided_json": DIGIT}, "[0-9]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_whole_answer_matches_grammar(api: Api, fields: dict[str, Any], pattern: str) -> None:
    for choice in answers(api, **fields):
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.fullmatch(pattern, text, re.DOTALL), text


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


INNER = {"type": "object", "properties": {"a": {"items": {"anyOf": [DIGIT, {"type": "foo"}]}}}}
BOMB = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103, 107)]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_json": INNER}, "", "at /properties/a/items/anyOf/1: Invalid type: foo"),
        ({"guided_json": {"uniqueItems": True}}, "", "uniqueItems"),
        ({"guided_json": {"$ref": "#"}}, "", "accepts no text"),
        ({"guided_json": {"$ref": "http://a/b"}}, "", "http://a/b"),
        ({"guided_json": nested(70)}, "", "nested deeper than 64"),
        ({"guided_json": "["}, "", "not valid JSON"),
        ({"guided_json": "[" * 50_000}, "", "nested deeper than 64"),
        ({"guided_json": {"description": "x" * 70_000}}, "", "at most 65536"),
        ({"guided_json": BOMB}, "", "simplify it"),
        ({"guided_regex": "(a"}, "", "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "", "look-around"),
        ({"guided_regex": ""}, "", "empty"),
        ({"guided_grammar": "start: b"}, "", 'unknown name: "b"'),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json", "both given"),
        ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "guided_regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "", "not supported"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "", "got 2"),
        ({"response_format": {"type": "json_schema"}}, "", "needs json_schema"),
        ({"response_format": schema_field({"type": "foo"})}, "", "Invalid type: foo"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_structure_is_rejected_with_field_and_place(
    api: Api, fields: dict[str, Any], param: str, message: str
) -> None:
    response = api.post("/v1/completions", prompt="a", **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == (param or next(iter(fields)))
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert answers(api, guided_regex="a", n=1)[0]["text"] == "a"


def test_compiler_process_is_bounded_and_restarted(api: Api) -> None:
    """The last compilation ended the process, or not: the next one works."""
    grammars = api.app.app_state.grammars
    assert answers(api, guided_regex="ab", n=1)[0]["text"] == "ab"
    process = grammars._process
    assert process
    process.kill()
    process.wait()
    assert answers(api, guided_regex="abc", n=1)[0]["text"] == "abc"
    assert grammars._process is not process
    assert len(grammars._answers) <= grammar_compiler.MAX_CACHED


@pytest.mark.parametrize("kind", ["attention", "prefill"])
def test_generation_continues_behind_tokens_of_another_rank(kind: str) -> None:
    """The rest is the same wherever the output was cut, and nothing follows its end."""
    tokenizer = Tokenizer.load(FOLDER)
    sampling = Sampling(max_tokens=200, seed=3, grammar=grammar_of("json", json.dumps(SCHEMAS[-2])))
    prompt = tokenizer.encode("JSON: ")
    with rank_of(kind, FOLDER) as (_, client):
        fields: dict[str, Any] = {"sampling": sampling, "eos_token_ids": tokenizer.eos_token_ids}
        whole, end = client.generated(client.submit(prompt, **fields))
        assert end.reason == "stop"
        jsonschema.validate(json.loads(tokenizer.decode(whole)), SCHEMAS[-2])
        for cut in (1, len(whole) // 2, len(whole)):
            sent = client.submit([*prompt, *whole[:cut]], generated=cut, **fields)
            rest, again = client.generated(sent)
            assert whole[:cut] + rest == whole
            assert again.reason == end.reason
            assert again.usage.completion_tokens == end.usage.completion_tokens


def test_grammar_that_does_not_compile_ends_its_sequence_only() -> None:
    tokenizer = Tokenizer.load(FOLDER)
    with rank_of("attention", FOLDER) as (_, client):
        fields: dict[str, Any] = {"eos_token_ids": tokenizer.eos_token_ids}
        good = client.submit([1, 2], sampling=Sampling(max_tokens=4, ignore_eos=True), **fields)
        bad = client.submit([1, 2], sampling=Sampling(grammar="start: x"), **fields)
        cut = Sampling(grammar=grammar_of("regex", "ab"))
        wrong = client.submit([1, 2, 9], sampling=cut, generated=1, **fields)
        digits = tokenizer.encode("1" * 150)
        ambiguous = Sampling(max_tokens=99, grammar='start: e\ne: e e | e "1" e | "1"')
        many = client.submit(digits, sampling=ambiguous, generated=len(digits) - 1, **fields)
        assert "items" in client.failed(many).message
        assert "unknown name" in client.failed(bad).message
        assert client.failed(wrong).status == 400
        assert len(client.generated(good)[0]) == 4


def test_preempted_sequences_continue_in_their_grammar() -> None:
    tokenizer = Tokenizer.load(FOLDER)
    grammar = grammar_of("regex", "([a-z]{2,9} ){40}")
    config = group_config(kv={"pool_tokens": 16 * 16})
    with ThreadGroup(FOLDER, config) as group, group.client() as client:
        sent = [
            client.submit(
                tokenizer.encode("Words:"),
                sampling=Sampling(max_tokens=200, seed=seed, grammar=grammar),
                eos_token_ids=tokenizer.eos_token_ids,
            )
            for seed in range(6)
        ]
        texts = [tokenizer.decode(client.generated(each)[0]) for each in sent]
        assert loop_of(group.attention[0]).scheduler.requeued_total > 0
    assert all(re.fullmatch("([a-z]{2,9} ){40}", text) for text in texts), texts


@pytest.mark.usefixtures("ranks_are_forked")
def test_guided_answers_continue_when_a_rank_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.local_group.new_token", lambda: TOKEN)
    with LocalGroup(str(FOLDER), group_config(2, 1)) as group:
        ranks: Any = [RunningRank(*each) for each in group.client_addresses.items()]
        with serve_api(FOLDER, ranks, eos_text="<|im_end|>") as api:
            body = {"prompt": "Words:", "n": 4, "seed": 1, "max_tokens": 200, "stream": True}
            expected = streamed_texts(api, body)
            assert all(re.fullmatch(WORDS, text) for text in expected)
            kill = partial(group.processes["attention-0"].send_signal, signal.SIGKILL)
            assert expected == streamed_texts(api, body, kill)
            assert [client.problem is None for client in api.backend.clients] == [False, True]


WORDS = "([a-z]{2,9} ){40}"


def streamed_texts(
    api: Api, body: dict[str, Any], disturb: Callable[[], None] | None = None
) -> list[str]:
    """Return the text of each choice. disturb: called once each choice has begun."""
    texts = [""] * body["n"]
    more = {"guided_regex": WORDS}
    for chunk in api.openai.completions.create(model=MODEL, extra_body=more, **body):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        if disturb and all(texts):
            disturb()
            disturb = None
    assert disturb is None
    return texts


@run_async
async def test_tenants_take_turns_in_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_slowly(request: CompileRequest) -> CompileAnswer:
        compiled.append(request.text)
        time.sleep(0.01)
        return CompileAnswer("grammar")

    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 4)
    compiler = grammar_compiler.GrammarCompiler(None, ())  # type: ignore[arg-type]
    monkeypatch.setattr(compiler, "_compile", compile_slowly)

    def send(text: str, tenant: bytes, number: int) -> asyncio.Task[CompileAnswer]:
        request = CompileRequest("regex", text)
        return asyncio.create_task(compiler.compile(request, Caller(tenant, number)))

    many = [send(f"a{number}", b"a", number) for number in range(4)]
    await asyncio.sleep(0.001)
    same, refused, other = send("a3", b"a", 4), send("a4", b"a", 5), send("b", b"b", 6)
    with pytest.raises(OverloadError, match="of this key wait"):
        await refused
    await asyncio.gather(*many, same, other)
    assert compiled.index("b") <= 2
    assert sorted(compiled) == ["a0", "a1", "a2", "a3", "b"]
    compiler.close()
