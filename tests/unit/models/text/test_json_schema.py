"""JSON schemas: what the grammar of a schema accepts is valid by the schema."""

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

from models.text.grammar import CompileRequest, compile_source, grammar_tokenizer, new_matcher
from models.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import write_byte_level

NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}
ROOT_ID = {"$id": "http://a/b/", "$defs": {"x": {"$id": "http://a/x", "type": "string"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    loaded = Tokenizer.load(write_byte_level(tmp_path_factory.mktemp("tokenizer")))
    return grammar_tokenizer(loaded.to_json(), loaded.eos_token_ids)


def compiled(tokenizer: LLTokenizer, schema: Any) -> tuple[str, str]:
    answer = compile_source(tokenizer, CompileRequest("json", json.dumps(schema)))
    return answer.grammar, answer.error


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        (True, ["1", '{"a":[null]}'], ["{"]),
        (NAMED, ['{"a":1}', "{}"], ['{"a":"x"}', '{"b":1}']),
        (
            {**NAMED, "additionalProperties": True},
            ['{"a":1}', '{"b":"x"}'],
            ['{"a":"x"}', '{"\\u0061":"x"}', '{"a":1,"\\u0061":"x"}'],
        ),
        ({"items": {"anyOf": [NAMED]}}, ['[{"a":1}]'], ['[{"b":1}]']),
        ({"allOf": [NAMED, {"properties": {"b": {}}}]}, ['{"a":1,"b":"x"}'], ['{"a":"x"}']),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        (
            {"type": "object", "required": ["a"], "minProperties": 2},
            ['{"a":1,"b":2}'],
            ['{"a":1}', '{"a":1,"a":2}'],
        ),
        (
            {"type": ["string", "null"], "format": "date"},
            ['"2020-02-29"', '"2000-02-29"', '"2021-02-28"', '"2021-12-31"', "null"],
            ['"2021-02-29"', '"1900-02-29"', '"2021-04-31"', '"2021-20-01"'],
        ),
        (
            {"type": "string", "format": "time"},
            ['"23:59:59Z"', '"00:00:00.5+01:00"'],
            ['"23:59:60Z"', '"12:00:60.1Z"'],
        ),
        (
            {"type": "string", "format": "date-time", "allOf": [{"pattern": "^2"}]},
            ['"2020-02-29T23:59:59Z"'],
            ['"2020-02-29T23:59:60Z"', '"2021-02-29T00:00:00Z"', '"1999-01-01T00:00:00Z"'],
        ),
        ({"format": "email"}, [f'"{"a" * 64}@b.de"'], [f'"{"a" * 65}@b.de"', '"a"']),
        ({"type": "string", "format": "password", "maxLength": 2}, ['"ab"'], ['"abc"']),
        (
            {"properties": {"format": {"format": "date"}}},
            ['{"format":"2000-01-01"}'],
            ['{"format":"x"}'],
        ),
        ({"type": "string", "pattern": '^[^"]*$'}, ['"a\\\\\\n"'], ['"\\""']),
        ({"type": "string", "pattern": "^(\\P{Po}|[[:^punct:]])*$"}, [], ['"\\""', '"\\\\"']),
        ({"type": "string", "pattern": "^[^-\\\\]\\[\\^?$"}, ['"a["', '"\\n["'], ['"\\\\["']),
        ({"patternProperties": {'^[^"]$': {"const": 1}}}, ['{"a":1}', '{"\\"":2}'], ['{"a":2}']),
        ({**ROOT_ID, "$ref": "#/$defs/x"}, ['"a"'], ["1"]),
        ({"enum": [{"format": "date"}]}, ['{"format":"date"}'], ["{}"]),
        ({"type": "string", "pattern": "^\\d[\\w-]$"}, ['"1a"', '"1-"'], ['"१a"', '"1é"']),
        ({"type": "string", "pattern": "^\\s[^\\s]\\S$"}, ['"\u00a0éa"'], ['"\u0085aa"', '"  a"']),
        ({"type": "string", "pattern": "^\\D\\W$"}, ['"a-"'], ['"1-"', '"aa"']),
        ({"type": "string", "pattern": "^[^\\x00-\\x1f\\x7f]$"}, ['"a"'], ['""', '"ab"']),
        ({"const": "\\u0001\n"}, ['"\\\\u0001\\n"'], ['"\\n"']),
    ],
    ids=lambda value: json.dumps(value)[:40],
)  # fmt: skip
def test_grammar_accepts_what_the_schema_means(
    tokenizer: LLTokenizer, schema: Any, accepted: list[str], refused: list[str]
) -> None:
    grammar, error = compiled(tokenizer, schema)
    assert not error
    for text in accepted + refused:
        token_ids = tokenizer.tokenize_str(text)
        matcher = new_matcher(tokenizer, grammar)
        fits = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
        assert fits == (text in accepted), text
    for text in accepted:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        (False, "false accepts no text"),
        ([], "expected an object"),
        ({"x-guidance": {"coerce_one_of": True}}, "at /x-guidance: not supported"),
        (
            {"properties": {"a": {"type": "object", "minProperties": 2}}},
            "at /properties/a/minProperties: 2 is more than the 0 required names plus one",
        ),
        (
            {**ROOT_ID, "allOf": [{"$id": "http://a/c/", "$ref": "x"}]},
            "at /allOf/0/$id: not supported beside $ref",
        ),
        ({"items": {"const": ["a\x01"]}}, "at /items/const: control characters"),
        ({"enum": ["\x7f"]}, "at /enum: control characters"),
        ({"pattern": "^a\\x01b$"}, "at /pattern: control characters"),
        ({"patternProperties": {"^\\cA$": {}}}, "at /patternProperties: control characters"),
        ({"items": {"format": "iri"}}, "at /items: Unknown format: iri"),
        ({"items": {"oneOf": [{}, {"type": "null"}]}}, "at /items: oneOf"),
        ({"$schema": "x"}, "Resource 'json-schema:///x'"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_schema_that_cannot_be_enforced_is_rejected_with_its_place(
    tokenizer: LLTokenizer, schema: Any, error: str
) -> None:
    assert error in compiled(tokenizer, schema)[1]
