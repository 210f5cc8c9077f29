"""Servers that a command asks: where they are, the key, and how it is told that nobody answers."""

from __future__ import annotations

from contracts.errors import ConfigError


def check_url(url: str) -> None:
    """Raises ConfigError."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: begin it with http:// or https://")


def bearer(key: str | None) -> dict[str, str]:
    """Headers."""
    return {"authorization": f"Bearer {key}"} if key else {}


def no_answer(url: str, error: Exception) -> ConfigError:
    return ConfigError(f"--url {url}: no answer: {str(error) or type(error).__name__}")
