"""Validation of API keys when the configuration is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.errors import ConfigError
from contracts.loading import config_from, load_config


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ([""], "api_keys[0] is empty"),
        (["good", ""], "api_keys[1] is empty"),
        ([" key"], "character 1 of 4"),
        (["key "], "character 4 of 4"),
        (["two words"], "character 4 of 9"),
        (["tab\tbed"], "character 4 of 7"),
        (["line\nfeed"], "character 5 of 9"),
        (["nul\0"], "character 4 of 4"),
        (["schlüssel"], "character 5 of 9"),
        (["k" * 201], "201 characters, at most 200"),
        (["a", "b", "a"], "api_keys[2] is the same as api_keys[0]"),
        (["a", {"key": "a", "priority": "be"}], "api_keys[1] is the same as api_keys[0]"),
        ([{"key": "two words"}], "api_keys[0]: character 4 of 9"),
        ([{"key": "secret", "tenant": ""}], "api_keys[0].tenant is empty"),
        ([{"key": "secret", "priority": "high"}], "high"),
        ([{"key": "secret", "class": "be"}], "class"),
    ],
)
def test_invalid_key_is_rejected_by_position(keys: list[Any], place: str) -> None:
    """An empty string among api_keys opened the server."""
    with pytest.raises(ConfigError) as caught:
        config_from({"http": {"api_keys": keys}}, source="here")
    assert place in caught.value.message
    assert "\n" not in caught.value.message
    for key in (each if isinstance(each, str) else each["key"] for each in keys):
        assert len(key) < 3 or key not in caught.value.message, "keys do not belong into logs"


@pytest.mark.parametrize("key", ["", " ", "ä"])
def test_invalid_metrics_key_is_rejected(key: str) -> None:
    with pytest.raises(ConfigError, match="metrics_key"):
        config_from({"http": {"metrics_key": key}}, source="here")


def test_valid_keys_are_accepted() -> None:
    keys = ["sk-abcDEF0123", "a/b+c==", "0" * 200]
    config = config_from({"http": {"api_keys": keys}}, source="here")
    assert config.http.api_keys == keys


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("http.tls_certificate=a.pem", "belong together"),
        ("http.tls_key=a.pem", "belong together"),
        ("http.root_path=llm", "root_path"),
        ("http.root_path=/llm/", "root_path"),
    ],
)
def test_incomplete_tls_and_invalid_root_path_are_rejected(override: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load_config(None, [override])
