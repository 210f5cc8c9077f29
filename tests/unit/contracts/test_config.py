"""Configuration files, overrides and API keys."""

import pickle
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from cluster.serving.settings import with_absolute_paths
from contracts.api_keys import ApiKey
from contracts.config import ChannelConfig, PrefillConfig, TandemConfig
from contracts.device_modes import MODES, Mode
from contracts.errors import ConfigError
from contracts.loading import config_from, load_config
from contracts.plan import Order
from tests.architecture.support import ROOT
from tests.support.one_line_errors import one_line_error


def test_defaults_without_settings(tmp_path: Path) -> None:
    assert load_config() == TandemConfig()
    (tmp_path / "a.yaml").write_text("# empty\n")
    assert load_config(tmp_path / "a.yaml") == TandemConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "schedule:\n  order: aass\n  r1: 3\nmodel: {dtype: float32}\n"),
        ("a.toml", '[schedule]\norder = "aass"\nr1 = 3\n[model]\ndtype = "float32"\n'),
    ],
)
def test_yaml_and_toml_are_equivalent(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    config = load_config(tmp_path / name)
    assert (config.schedule.order, config.schedule.r1) == (Order.AASS, 3)
    assert config.model.dtype == "float32"
    assert config.kv == TandemConfig().kv


def test_last_override_wins_and_values_are_yaml() -> None:
    config = load_config(
        None,
        [
            "schedule.r1=2",
            "schedule.r1=4",
            "kv.prefix_cache=false",
            "http.api_keys=[a, b]",
            "model.max_context_tokens=null",
            "model.name=a=b",
            "groups.attention_resources={ag: 1}",
        ],
    )
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.schedule.r1 == 4
    assert config.kv.prefix_cache is False
    assert config.http.api_keys == ["a", "b"]
    assert config.http.clients == [ApiKey("a"), ApiKey("b")]
    assert config.model.max_context_tokens is None
    assert config.model.name == "a=b"
    assert config.groups.attention_resources == {"ag": 1.0}


@pytest.mark.parametrize(
    "tree",
    [
        {"schedule": {"order": "naive", "r1": 2}},
        {"schedule": {"order": "naive", "r1": 1, "r2": 2}},
        {"schedule": {"order": "pppipe", "r2": 2}},
        {"channel": {"heartbeat_interval_s": 1.0, "heartbeat_timeout_s": 1.5}},
        {"kv": {"block_tokens": 0}},
        {"groups": {"ready_timeout_s": 0}},
        {"http": {"port": -1}},
        {"trace": {"spans": -1}},
        {"prefill": {"experts": "cached"}},
        {"experts": {"slots": 4, "bytes": 100}},
        {"experts": {"speculative": "speculated"}},
        {"experts": {"speculative": "speculated", "slots": 9, "predictor": "none"}},
    ],
)
def test_bounds_and_cross_field_rules_fail_with_one_line(tree: dict[str, object]) -> None:
    (section,) = tree
    with one_line_error(ConfigError, section, start="here: "):
        config_from(tree, source="here")


def test_relative_paths_are_relative_to_the_command_line(tmp_path: Path) -> None:
    for name in ("bundled", "a", "deeper"):
        (tmp_path / name).mkdir()
    given = ["planner.hardware=h200-node", "prefill.host_store=made/later", "model.name=a"]
    for path, made in (("a", f"{tmp_path}/a"), ("bundled", "bundled"), ("org/model", "org/model")):
        config = load_config(None, [f"model.path={path}", *given])
        absolute = with_absolute_paths(config, tmp_path)
        assert absolute.model.path == made
        assert absolute.prefill.host_store == f"{tmp_path}/made/later"
        assert (absolute.planner.hardware, absolute.model.name) == ("h200-node", "a")
    assert with_absolute_paths(TandemConfig(), tmp_path) == TandemConfig()


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-a", "a-", "a" * 41, "ä"])
def test_invalid_application_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=r"1 to 40 letters, digits and - _ .* `serve`"):
        config_from({"serve": {"name": name}}, source="here")
    assert load_config(None, ["serve.name=Tandem_a-2.b"]).serve.name == "Tandem_a-2.b"


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ([""], "api_keys[0] is empty"),
        (["two words"], "character 4 of 9"),
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
    """An empty string among api_keys would open the server."""
    with pytest.raises(ConfigError) as caught:
        config_from({"http": {"api_keys": keys}}, source="here")
    assert place in caught.value.message
    assert "\n" not in caught.value.message
    for key in (each if isinstance(each, str) else each["key"] for each in keys):
        assert len(key) < 3 or key not in caught.value.message, "keys do not belong into logs"


def test_valid_keys_are_accepted() -> None:
    keys = ["sk-abcDEF0123", "a/b+c==", "0" * 200]
    config = config_from({"http": {"api_keys": keys}}, source="here")
    assert config.http.api_keys == keys


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("http.tls_certificate=a.pem", "belong together"),
        ("http.tls_key=a.pem", "belong together"),
        ("http.metrics_key=''", "metrics_key"),
        ("http.metrics_key=ä", "metrics_key"),
        ("http.root_path=llm", "root_path"),
        ("schedule.order=fifo", "choose naive, pppipe, asas, aass"),
        ("http.root_path=/llm/", "root_path"),
    ],
)
def test_invalid_setting_is_rejected(override: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load_config(None, [override])


_ALONE = ["groups.prefill_ranks=2", "groups.expert_ranks=0", "groups.attention_ranks=0"]
_BESIDE = {  # what a mode needs
    "experts.slots, experts.bytes (expert ranks)": ["experts.slots=9"],
    "experts.storage_format (experts.slots, experts.bytes)": [
        "experts.slots=9",
        "experts.storage_format=true",
        *_ALONE,
    ],
    "experts.speculative=speculated": ["experts.slots=9", *_ALONE],
    "prefill.experts=cached": ["experts.slots=9"],
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", MODES, ids=[mode.setting for mode in MODES])
def test_mode_is_tested_on_a_device_or_refused_by_name(mode: Mode, device: str) -> None:
    settings = [f"groups.device={device}", *_BESIDE.get(mode.setting, [])]
    settings += _ALONE if mode.setting.startswith("prefill.") else []
    settings += [mode.setting] if "=" in mode.setting else []
    tested = mode.cuda if device == "cuda" else mode.cpu
    if tested:
        assert (ROOT / tested).is_file()
        assert mode.is_set(load_config(None, settings))
        return
    with pytest.raises(ConfigError) as caught:
        load_config(None, settings)
    expected = f"{mode.setting}: not with groups.device={device}: {mode.instead}"
    assert expected in caught.value.message


def test_every_kind_of_experts_and_channel_is_a_mode() -> None:
    names = {mode.setting for mode in MODES}
    for key, section in (("prefill.experts", PrefillConfig), ("channel.backend", ChannelConfig)):
        values = get_args(get_type_hints(section)[key.partition(".")[2]])
        assert {f"{key}={value}" for value in values if value != "auto"} <= names
