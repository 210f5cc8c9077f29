"""Section `http`."""

import re
from typing import Annotated, Literal

from msgspec import Meta

from contracts.api_keys import ApiKey, api_key, check_keys, check_operator_key
from contracts.config.section import Count, InputPath, Seconds, Section

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class HttpConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HTTP server: authentication, connections, and limits of a request."""

    front: Literal["direct", "serve"] = "direct"
    """HTTP front end. "direct": the ingress listens on host:port, without a Ray call per streamed
    token. "serve": behind Ray Serve's proxy (`serve run`), which has its own host and port."""
    host: str = "127.0.0.1"
    """Listening address with front=direct."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Listening port with front=direct. `tandem serve` rejects 0."""
    max_body_bytes: Count = 8 << 20
    """Maximum bytes of a request body. Larger bodies are rejected with 413."""
    max_batch_items: Count = 4096
    """Maximum texts of a classification request, or sequences of a completion request."""
    request_timeout_s: Seconds = 600.0
    """Maximum seconds of a request in total. After that it fails with 504."""
    api_keys: list[str | ApiKey] = []
    """Bearer tokens for model requests. Empty: no authentication. An entry is a token or {key:
    TOKEN, priority: be, tenant: NAME}: priority is the default class of its requests (ls if not
    given), tenant the group of tokens with which it shares turns (none). fixed_priority: true
    forbids another class in a request. requests_per_s, tokens_per_s (long-term rates) and
    concurrency (simultaneous requests) limit its use."""
    keys_file: InputPath | None = None
    """YAML or JSON file with api_keys and optionally metrics_key, in place of api_keys here.
    Changes apply within seconds. An invalid file is ignored and the previous keys stay."""
    allow_public: bool = False
    """Allow a server without keys to listen on an address that other machines can reach."""
    metrics_key: str | None = None
    """Bearer token for /metrics, /load, /status, /trace and the exporters. null: no authentication.
    One in keys_file takes precedence, for exporters on machines that have the file."""
    operator_key: str | None = None
    """Bearer token for /scale (`tandem scale`). null: with front=direct on 127.0.0.1 and without
    keys /scale is open to this machine; otherwise it is disabled."""
    tls_certificate: InputPath | None = None
    """PEM file; requires tls_key. null: plain HTTP."""
    tls_key: InputPath | None = None
    """PEM file; requires tls_certificate."""
    root_path: str = ""
    """Path prefix that a reverse proxy removes, such as /llm."""
    allowed_origins: list[str] = []
    """Origins of web pages that may send model requests (CORS), such as https://chat.example.org.
    "*": all."""
    access_log: bool = True
    """Log a line per request (logger tandem.access), without request text."""
    access_log_exclude: list[str] = []
    """Paths whose successful requests are not logged, such as /health and /metrics."""
    max_header_bytes: Annotated[int, Meta(ge=256, le=1 << 20)] = 16 << 10
    """Maximum bytes of request line and headers, or of the trailers of a body."""
    max_headers: Count = 100
    """Maximum headers of a request, or trailers of its body."""
    max_connections: Count | None = None
    """Maximum connections. null: from the descriptor limit, up to 8192. At the limit the server
    closes the oldest connection that has not sent a valid key (or, without keys, a complete
    request), then the longest idle one; if all are active it refuses the new one."""
    max_connections_per_address: Count | None = None
    """Maximum connections per client address, for servers without a proxy. null: no limit."""
    header_timeout_s: Seconds = 10.0
    """Seconds from accepting a connection, or from the first byte of a further request, to the end
    of its headers."""
    keep_alive_timeout_s: Seconds = 75.0
    """Seconds that a connection may be idle between requests."""
    body_timeout_s: Seconds = 60.0
    """Seconds from the end of the headers to the end of the body, also with front=serve."""
    write_timeout_s: Seconds = 60.0
    """Seconds that a client may read its response at less than 1 KiB/s before it is
    disconnected."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86400)] = 20.0
    """Seconds that the server completes open requests after SIGTERM or Ctrl-C; new requests get
    503. A second signal stops it at once. Also applies when `serve deploy` removes or redeploys the
    application."""

    @property
    def clients(self) -> list[ApiKey]:
        """Return `api_keys` in full form."""
        return [api_key(each) for each in self.api_keys]

    @property
    def has_keys(self) -> bool:
        """True if model requests need a key."""
        return bool(self.api_keys) or self.keys_file is not None

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        return self.front == "direct" and self.host in LOOPBACK

    def __post_init__(self) -> None:
        check_keys(self.clients, self.metrics_key)
        check_operator_key(
            self.operator_key, [*(one.key for one in self.clients), self.metrics_key]
        )
        if self.api_keys and self.keys_file is not None:
            raise ValueError(
                f"api_keys and keys_file={self.keys_file}: give one of them; all keys in the file"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                "tls_certificate and tls_key belong together (--ssl-certfile, --ssl-keyfile): "
                "give both, or neither"
            )
        if self.tls_certificate is not None and self.front == "serve":
            raise ValueError(
                "tls_certificate has no effect with front=serve: encrypt in front of Serve's proxy"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ValueError(
                    f"allowed_origins: {origin!r}: give scheme, host and port as a browser does, "
                    "such as https://chat.example.org, or *"
                )
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII):
            raise ValueError(
                f"root_path={self.root_path!r}: give a path such as /llm, without a slash at the "
                "end"
            )
