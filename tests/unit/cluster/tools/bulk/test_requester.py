"""Bulk jobs that generate or score: options, bodies, output lines."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.tools.bulk.answering import RowRequester
from cluster.tools.bulk.job import BulkJob, RequestTask, add_options, parse_job
from cluster.tools.bulk.records import GeneratedRow, InputRow, RowAnswer, RowOutcome, RowRequest
from contracts.errors import ConfigError, NotReadyError
from tests.support.api_harness import Api, serve_api
from tests.support.bulk_support import bulk_job
from tests.support.fake_rank import FakeRank
from tests.support.one_line_errors import one_line_error
from tests.support.tiny_tokenizer import CHATML, write_byte_level

ROWS = [RowRequest("p", "one {prefix}"), RowRequest("", "two")]
SCHEMA = {"type": "array", "maxItems": 0}


@pytest.fixture(scope="module", params=[None, CHATML], ids=["completions", "chat"])
def api(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Api]:
    folder = write_byte_level(tmp_path_factory.mktemp("model"), chat_template=request.param)
    with serve_api(folder, [FakeRank("attention-0", lambda submit: [60, 61])]) as api:
        yield api


def answers(api: Api, task: RequestTask, unavailable_s: float = 5.0) -> list[RowOutcome]:
    is_chat = api.tokenizer.has_chat_template

    async def run() -> list[RowOutcome]:
        requester = RowRequester(api.app, task, is_chat=is_chat, unavailable_s=unavailable_s)
        return await requester.answer(ROWS)

    return api.loop.run(run())


def job(*options: str, **more: Any) -> BulkJob:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parse_job(parser.parse_args(["--input", "a.csv", "--output", "out", *options]))


def test_rows_get_the_text_of_the_endpoint(api: Api) -> None:
    task = RequestTask(kind="generate", template="{prefix}{text}", fields={"max_tokens": 2})
    found = answers(api, task)
    text = api.tokenizer.decode([60, 61])
    for row, answer in zip(ROWS, found, strict=True):
        assert isinstance(answer, GeneratedRow)
        assert (answer.text, answer.completion_tokens) == (text, 2)
        prompt = api.tokenizer.decode(api.rank.submits.get().token_ids)
        assert f"{row.prefix}{row.text}" in prompt


def test_refused_rows_give_the_reason(api: Api) -> None:
    fields = {"max_tokens": 2, "temperature": -1}
    (first, _) = answers(api, RequestTask(kind="generate", fields=fields))
    assert "temperature" in getattr(first, "reason", "")
    task = RequestTask(kind="generate", fields={"max_tokens": 1}, is_json=True)
    (first, _) = answers(api, task)
    assert "--max-tokens" in getattr(first, "reason", "")


def test_rows_are_scored(api: Api) -> None:
    fields = {"label_token_ids": [5, 6], "apply_softmax": True}
    for answer in answers(api, RequestTask(kind="score", fields=fields)):
        assert isinstance(answer, RowAnswer)
        assert len(answer.probs) == 2
        assert sum(answer.probs) == pytest.approx(1)


def test_unavailable_ranks_end_the_job(api: Api) -> None:
    api.rank.fail_with = ("all busy", "overloaded", 429)
    try:
        with pytest.raises(NotReadyError, match="all busy"):
            answers(api, RequestTask(kind="generate", fields={"max_tokens": 2}), 0.2)
    finally:
        api.rank.fail_with = None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--labels: missing"),
        (("--task", "generate", "--labels", "a,b"), "--labels: has no effect"),
        (("--task", "generate", "--template", "x"), "{text}"),
        (("--task", "generate", "--schema", "/none"), "--schema /none: cannot be read"),
        (("--task", "generate", "--body", "a"), "--body a: give FIELD=VALUE"),
        (("--task", "generate", "--max-tokens", "0"), "--max-tokens=0"),
        (("--task", "score"), "--label-token-ids"),
        (("--task", "score", "--label-token-ids", "1", "--template", "{text}"), "--template: has"),
        (("--labels", "a,b", "--max-tokens", "5"), "--max-tokens: has no effect"),
    ],
)
def test_wrong_options_are_one_line(options: tuple[str, ...], message: str) -> None:
    with one_line_error(ConfigError, message):
        job(*options)


def test_options_become_requests(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    task = job("--task", "generate", "--schema", str(schema), "--body", "temperature=0").requests
    assert task
    assert task.is_json
    assert task.fields["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (task.fields["max_tokens"], task.fields["temperature"]) == (256, 0)
    scored = job("--task", "score", "--label-token-ids", "1, 2").requests
    assert scored == RequestTask(kind="score", fields={"label_token_ids": [1, 2]})


def test_lines_name_what_was_answered() -> None:
    row, answer = InputRow("a", "in:1", "", "t"), GeneratedRow("[1]", "stop", 3, 0, 2)
    tokens = {"finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 2}
    for is_json, shown in ((False, {"text": "[1]"}), (True, {"json": [1]})):
        task = RequestTask(kind="generate", is_json=is_json)
        line = bulk_job(Path("out"), requests=task).line(row, answer)
        assert json.loads(msgspec.json.encode(line)) == {"id": "a", **shown, **tokens}
    scored = bulk_job(Path("out"), requests=RequestTask(kind="score"))
    assert scored.line(row, RowAnswer([0.5], 3, 0)) == {
        "id": "a",
        "scores": [0.5],
        "prompt_tokens": 3,
    }
