"""OpenTelemetry spans of requests, sent by OTLP/HTTP. Without an endpoint the SDK is not imported.

A request's span has children for each sequence: `queue` until its first batch starts, `prefill`
until its first token arrives, `decode` until its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import Scope

from cluster.routing.ticket import TIMINGS, SequenceTiming
from contracts.clock import monotonic_s
from contracts.config import FROM_ENVIRONMENT, TRACES_PATH, TandemConfig
from contracts.errors import ConfigError
from contracts.metrics import RequestOutcome
from contracts.requests import Usage

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

TRACE = "trace"  # in scope["state"]
CLOSE_TIMEOUT_S = 1.0
_OPERATIONS = {  # of the semantic conventions for generative AI, and ours
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/classify": "classify",
    "/v1/score": "score",
}

TraceHeaders = tuple[tuple[str, str], ...]


class RequestTrace:
    """The span of one request, while it is open."""

    def __init__(self, span: Span) -> None:
        self.status = 0
        self.timings: list[SequenceTiming] = []
        self._span = span
        self._usage = [0, 0, 0]

    def add_usage(self, usage: Usage) -> None:
        counts = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        self._usage = [total + count for total, count in zip(self._usage, counts, strict=True)]

    def set_result(self, pipeline: str, priority: str, outcome: RequestOutcome) -> None:
        self._span.set_attribute("tandem.pipeline", pipeline)
        self._span.set_attribute("tandem.priority", priority)
        if outcome is not RequestOutcome.OK:
            self._span.set_attribute("error.type", outcome.value)

    def describe(self) -> None:
        """Set the attributes that are known at the end."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("http.response.status_code", self.status)
        if self.timings:
            prompt, completion, cached = self._usage
            self._span.set_attribute("gen_ai.usage.input_tokens", prompt)
            self._span.set_attribute("gen_ai.usage.output_tokens", completion)
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached)
        if self.status >= 500 or not self.status:
            self._span.set_status(StatusCode.ERROR)


class RequestTracer:
    """Source of the requests' spans. processor: receives them; owned by the tracer."""

    def __init__(self, processor: SpanProcessor, model: str, service: str) -> None:
        """service: name of the service, unless the environment has another one."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": service}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tandem")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    @contextmanager
    def request(self, scope: Scope, path: str, request_id: str) -> Iterator[RequestTrace | None]:
        """Open the span of a request. None: the trace is not sampled."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        attributes = {
            "http.request.method": "POST",
            "http.route": path,
            "tandem.request_id": request_id,
        }
        if path in _OPERATIONS:
            attributes["gen_ai.operation.name"] = _OPERATIONS[path]
            attributes["gen_ai.provider.name"] = "tandem"
            attributes["gen_ai.request.model"] = self._model
        parent = self._propagator.extract(dict(trace_headers(scope["headers"])))
        start_ns, start_s = time.time_ns(), monotonic_s()
        span = self._tracer.start_span(
            f"POST {path}", parent, SpanKind.SERVER, attributes, start_time=start_ns
        )
        if not span.is_recording():
            yield None
            return
        epoch_ns = start_ns - round(1e9 * start_s)  # one offset: no jump of the clock in a trace
        trace = RequestTrace(span)
        token = TIMINGS.set(trace.timings)
        try:
            yield trace
        finally:
            TIMINGS.reset(token)
            trace.describe()
            for timing in trace.timings:
                self._add_phases(set_span_in_context(span), timing, epoch_ns)
            span.end(epoch_ns + round(1e9 * monotonic_s()))

    def _add_phases(self, parent: Context, timing: SequenceTiming, epoch_ns: int) -> None:
        attributes: dict[str, str | int] = {
            "tandem.rank": timing.rank,
            "tandem.attempts": timing.attempts,
        }
        for name, start_s, end_s in timing.phases(monotonic_s()):
            start_ns, end_ns = (epoch_ns + round(1e9 * at_s) for at_s in (start_s, end_s))
            span = self._tracer.start_span(name, parent, attributes=attributes, start_time=start_ns)
            span.end(end_ns)

    def close(self) -> None:
        """Send what is queued, for at most CLOSE_TIMEOUT_S."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> TraceHeaders:
    """Return the W3C headers of a trace. Several traceparent headers are none."""
    found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in headers:
        if name in (b"traceparent", b"tracestate"):
            found[name.decode()].append(value.decode("latin-1"))
    if len(found["traceparent"]) != 1:
        return ()
    return tuple((name, ",".join(values)) for name, values in found.items() if values)


def build_tracer(config: TandemConfig, model: str) -> RequestTracer | None:
    """Return the tracer of trace.otlp_endpoint, None if it is off. Raises ConfigError."""
    endpoint = config.trace.otlp_endpoint
    if (
        endpoint is None or endpoint == FROM_ENVIRONMENT
    ):  # a bulk job takes none from its environment
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"trace.otlp_endpoint: {error}: pip install 'tandem-moe[otel]', or leave it out"
        ) from None
    has_path = urlsplit(endpoint).path.strip("/")
    url = endpoint if has_path else endpoint.rstrip("/") + TRACES_PATH
    return RequestTracer(BatchSpanProcessor(OTLPSpanExporter(url)), model, config.serve.name)
