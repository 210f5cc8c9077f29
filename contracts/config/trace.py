"""Section `trace`."""

from urllib.parse import urlsplit

from contracts.config.section import NonNegative, Section

FROM_ENVIRONMENT = "environment"
TRACES_PATH = "/v1/traces"


class TraceConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeline of a rank's tasks, and OpenTelemetry spans of requests."""

    spans: NonNegative = 20_000
    """Latest task spans that each rank keeps. 0: recording is off."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP/HTTP), such as http://127.0.0.1:4318, which receives
    spans of requests. A URL without a path gets /v1/traces. "environment": that of
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT. null: no spans. Requires
    tandem-moe[otel]. Other OTEL_ variables apply: headers, service name, sampler."""

    def __post_init__(self) -> None:
        if self.otlp_endpoint in (None, FROM_ENVIRONMENT):
            return
        try:
            parts = urlsplit(self.otlp_endpoint)
            works = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            works = False
        if not works:
            raise ValueError(
                f"otlp_endpoint={self.otlp_endpoint!r}: use a URL such as http://127.0.0.1:4318, "
                f"or {FROM_ENVIRONMENT}"
            )
