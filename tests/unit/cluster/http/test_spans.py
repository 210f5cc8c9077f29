"""OpenTelemetry spans of requests: parents, phases, attributes, and collectors that fail."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.http.spans import RequestTracer, build_tracer
from cluster.routing.ticket import MAX_TIMINGS, SequenceTiming
from cluster.serving.settings import with_environment, with_variables
from contracts.config import TandemConfig, TraceConfig
from contracts.errors import ConfigError
from tests.support.api_harness import MODEL, TIMEOUT_S, Api, serve_api
from tests.support.otlp_collector import Collector
from tests.support.waiting import wait_until

sdk = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
export = pytest.importorskip("opentelemetry.sdk.trace.export")

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}


@pytest.fixture
def exporter() -> Any:
    return sdk.InMemorySpanExporter()


@pytest.fixture
def api(folder: Path, exporter: Any, tmp_path: Path) -> Iterator[Api]:
    tracer = RequestTracer(export.SimpleSpanProcessor(exporter), MODEL, "my-tandem")
    with serve_api(folder, tracer=tracer, storage=tmp_path / "batches") as api:
        yield api


def request_spans(exporter: Any, count: int = 1) -> list[Any]:
    """Return the spans of requests, which end after their responses."""

    def found() -> list[Any]:
        return [s for s in exporter.get_finished_spans() if s.name.startswith("POST ")]

    wait_until(lambda: len(found()) >= count, "spans are missing", TIMEOUT_S, 0.01)
    return found()


@pytest.mark.parametrize("stream", [False, True])
def test_request_has_a_span_in_the_clients_trace_and_one_per_phase(
    api: Api, exporter: Any, stream: bool
) -> None:
    body = {"model": MODEL, **CHAT, "stream": stream, "priority": "be"}
    headers = {**SAMPLED, "x-request-id": "mine"}
    assert api.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    (span,) = request_spans(exporter)
    assert span.name == "POST /v1/chat/completions"
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == SPAN_ID
    assert span.context.trace_state.get("vendor") == "1"
    assert span.resource.attributes["service.name"] == "my-tandem"
    prompt_tokens = len(api.rank.submits.get(timeout=TIMEOUT_S).token_ids)
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": MODEL,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "tandem.request_id": "mine",
        "tandem.pipeline": "generation",
        "tandem.priority": "be",
    }
    phases = [s for s in exporter.get_finished_spans() if s is not span]
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    ends = [span.start_time, *(phase.end_time for phase in phases), span.end_time]
    assert ends == sorted(ends)
    for phase in phases:
        assert phase.parent.span_id == span.context.span_id
        assert dict(phase.attributes) == {"tandem.rank": "attention-0", "tandem.attempts": 1}


@pytest.mark.parametrize(
    ("header", "is_traced"),
    [
        (f"00-{TRACE_ID}-{SPAN_ID}-00", False),
        ("00-" + "0" * 32 + f"-{SPAN_ID}-01", True),
        ("\xff" * 60, True),
    ],
)
def test_unsampled_trace_has_no_span_and_an_invalid_one_is_a_new_trace(
    api: Api, exporter: Any, header: str, is_traced: bool
) -> None:
    headers = {b"traceparent": header.encode("latin-1")}
    for _ in range(2):
        body = {"model": MODEL, **CHAT}
        assert api.http.post("/v1/chat/completions", json=body, headers=headers).is_success
    assert api.rank.submits.get(timeout=TIMEOUT_S).timed is is_traced
    api.post("/v1/chat/completions", **CHAT)
    assert len(request_spans(exporter, 1 + 2 * is_traced)) == 1 + 2 * is_traced
    assert all(f"{s.context.trace_id:032x}" != TRACE_ID for s in exporter.get_finished_spans())


def test_failed_request_and_many_sequences_keep_spans_bounded(api: Api, exporter: Any) -> None:
    assert api.post("/v1/completions", prompt=7).status_code == 400
    assert api.post("/v1/completions", prompt=["a"] * (MAX_TIMINGS + 9)).status_code == 200
    bad, _ = request_spans(exporter, 2)
    assert bad.attributes["http.response.status_code"] == 400
    assert bad.attributes["error.type"] == "refused"
    queued = [s for s in exporter.get_finished_spans() if s.name == "queue"]
    assert len(queued) == MAX_TIMINGS


def test_requests_of_a_batch_belong_to_the_trace_that_created_it(api: Api, exporter: Any) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = api.openai.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    api.openai.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="24h",
        extra_headers=SAMPLED,
    )
    (span,) = request_spans(exporter)
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == SPAN_ID


@pytest.mark.parametrize(
    ("timing", "phases"),
    [
        (SequenceTiming(1.0), [("queue", 1.0, 9.0)]),
        (SequenceTiming(1.0, end_s=3.0), [("queue", 1.0, 3.0)]),
        (
            SequenceTiming(1.0, queued_s=1.0, first_s=4.0, end_s=5.0),
            [("queue", 1.0, 2.0), ("prefill", 2.0, 4.0), ("decode", 4.0, 5.0)],
        ),
        (
            SequenceTiming(1.0, queued_s=7.0, first_s=4.0, end_s=4.0),
            [("queue", 1.0, 4.0), ("prefill", 4.0, 4.0)],
        ),
    ],
)
def test_phases_of_a_sequence_follow_each_other(
    timing: SequenceTiming, phases: list[tuple[str, float, float]]
) -> None:
    assert list(timing.phases(9.0)) == phases


@pytest.mark.parametrize(
    ("variables", "endpoint"),
    [
        ({}, None),
        ({"ENDPOINT": "http://a:1/"}, "http://a:1/v1/traces"),
        ({"ENDPOINT": "http://a:1", "TRACES_ENDPOINT": "http://b/x"}, "http://b/x"),
    ],
)
def test_endpoint_is_that_of_the_standard_variables(
    variables: dict[str, str], endpoint: str | None
) -> None:
    environment = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}
    config = TandemConfig(trace=TraceConfig(otlp_endpoint="environment"))
    assert with_variables(config, environment).trace.otlp_endpoint == endpoint
    assert with_environment(config, environment, "mine").trace.otlp_endpoint == endpoint
    assert with_variables(TandemConfig(), environment) == TandemConfig()
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        assert with_variables(config, {**environment, name: value}).trace.otlp_endpoint is None


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector", "http://", "http://a:x"])
def test_bad_endpoint_is_refused_by_name(url: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"otlp_endpoint=.*use a URL"):
        msgspec.convert({"trace": {"otlp_endpoint": url}}, TandemConfig)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_tracer(TandemConfig(), MODEL) is None
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace.export", None)
    config = TandemConfig(trace=TraceConfig(otlp_endpoint="http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match=r"pip install 'tandem-moe\[otel\]'"):
        build_tracer(config, MODEL)


@pytest.mark.long
@pytest.mark.parametrize("state", ["works", "hangs", "absent"])
def test_collector_receives_spans_and_costs_no_request(
    folder: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    collector = Collector(hangs=state == "hangs")
    port = collector.server_port
    if state != "works":
        monkeypatch.setattr("cluster.http.spans.CLOSE_TIMEOUT_S", 0.1)
    if state == "absent":
        collector.shutdown()
        collector.server_close()
    config = TandemConfig(trace=TraceConfig(otlp_endpoint=f"http://127.0.0.1:{port}"))
    with serve_api(folder, tracer=build_tracer(config, MODEL)) as api:
        for _ in range(3):
            assert api.post("/v1/chat/completions", **CHAT).status_code == 200
        api.app.close()
    if state == "works":
        path, body = collector.received.get(timeout=TIMEOUT_S)
        assert path == "/v1/traces"
        request = service.ExportTraceServiceRequest.FromString(body)
        (resource,) = request.resource_spans
        names = [span.name for scope in resource.scope_spans for span in scope.spans]
        assert names.count("POST /v1/chat/completions") == 3
        assert names.count("decode") == 3
    collector.released.set()
    collector.shutdown() if state != "absent" else None
