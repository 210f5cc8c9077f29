"""HTTP client of the commands: server address, key, and one-line errors."""

import ipaddress
import ssl
import time
from pathlib import Path
from typing import NamedTuple, TypeVar

import httpx
import msgspec

from contracts.errors import ConfigError

T = TypeVar("T")


def check_url(url: str) -> None:
    """Raise ConfigError unless `url` is an HTTP URL."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: begin it with http:// or https://")


def bearer(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def uses_proxies(url: str) -> bool:
    """Return whether proxies of the environment apply: never to this machine."""
    host = httpx.URL(url).host
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


class Server(NamedTuple):
    """A server. verify: its certificate is checked against this; False: not at all."""

    url: str
    key: str | None = None
    verify: ssl.SSLContext | bool = True


def tls_context(cacert: Path | None, *, is_insecure: bool) -> ssl.SSLContext | bool:
    """Return `Server.verify` for --cacert and --insecure. Raises ConfigError."""
    if cacert is None or is_insecure:
        return not is_insecure
    try:
        return ssl.create_default_context(cafile=cacert)
    except OSError as error:  # or ssl.SSLError, which is one
        reason = getattr(error, "reason", None) or error.strerror
        raise ConfigError(f"--cacert {cacert}: {reason}; give a PEM file") from None


class HttpAnswer(NamedTuple):
    status: int
    body: bytes


def send_request(
    server: Server,
    method: str,
    path: str,
    *,
    most_bytes: int,
    timeout_s: float,
    content: bytes | None = None,
) -> HttpAnswer:
    """Send a request and return its answer.

    content: JSON. timeout_s: until the next bytes; in all the answer may take twice as long. Raises
    ConfigError if no complete answer arrives.
    """
    headers = bearer(server.key) | ({} if content is None else {"content-type": "application/json"})
    end_s = time.monotonic() + 2 * timeout_s
    try:
        with (
            httpx.Client(
                base_url=server.url,
                headers=headers,
                timeout=timeout_s,
                trust_env=uses_proxies(server.url),
                verify=server.verify,
            ) as client,
            client.stream(method, path, content=content) as response,
        ):
            return HttpAnswer(response.status_code, read_answer(response, most_bytes, end_s))
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as error:  # or its proxy
        reason = str(error) or type(error).__name__
        raise ConfigError(f"--url {server.url}: no answer: {reason}") from None


def get_monitored(server: Server, path: str, *, most_bytes: int, timeout_s: float) -> HttpAnswer:
    """Send a GET with the monitoring key. Raises ConfigError without an answer or on status 401."""
    answer = send_request(server, "GET", path, most_bytes=most_bytes, timeout_s=timeout_s)
    if answer.status == 401:
        raise ConfigError(
            f"--url {server.url}: 401: give the key of its http.metrics_key as --api-key"
        )
    return answer


def read_answer(response: httpx.Response, most_bytes: int, end_s: float) -> bytes:
    """Read a streamed body.

    Raises httpx.ReadTimeout if it is longer than most_bytes or has not ended at end_s, on the
    monotonic clock.
    """
    parts, size = list[bytes](), 0
    for part in response.iter_bytes():
        parts.append(part)
        size += len(part)
        if size > most_bytes or time.monotonic() > end_s:
            raise httpx.ReadTimeout(f"its answer has no end after {size} bytes")
    return b"".join(parts)


def error_message(body: bytes) -> str:
    """Return the message of an error answer in one line."""
    try:
        decoded = msgspec.json.decode(body, type=dict[str, dict[str, str | None]])
        return str(decoded["error"]["message"])
    except (msgspec.DecodeError, KeyError, RecursionError):
        return " ".join(body[:200].decode("utf-8", "replace").split()) or "no answer"


def decode_answer(server: Server, path: str, answer: HttpAnswer, kind: type[T]) -> T:
    """Decode JSON. Raises ConfigError unless the status is 200 and the body a `kind`."""
    try:
        if answer.status == 200:
            return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, RecursionError):
        pass
    raise ConfigError(
        f"--url {server.url}: {path} answered {answer.status}, and not as Tandem does: is it "
        "another server, or another version?"
    )
