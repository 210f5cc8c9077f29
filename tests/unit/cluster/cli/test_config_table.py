"""`tandem config` prints every key of the configuration."""

from __future__ import annotations

import json

import msgspec
import pytest

from cluster.cli.config_page import TARGET, page
from cluster.cli.config_table import config_keys
from cluster.cli.main import main
from contracts.config import TandemConfig


def test_every_key_is_printed_with_default_and_accepted_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["config", "--set", "schedule.r1=4", "--set", "http.api_keys=[secret]", "--json"]) == 0
    )
    out = capsys.readouterr().out
    found = {key["key"]: key for key in json.loads(out)}
    tree = msgspec.to_builtins(TandemConfig())
    assert set(found) == {f"{section}.{key}" for section in tree for key in tree[section]}
    r1 = found["schedule.r1"]
    assert (r1["value"], r1["default"], r1["takes"]) == (4, 2, "int >= 1")
    assert found["groups.placement"]["takes"] == "pack, spread"
    assert found["log.level"]["meaning"] == "Minimum level of logged events."
    assert found["prefill.saturation_margin"]["takes"] == "float >= 0, <= 10"
    assert "secret" not in out


def test_table_is_printed_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    for part in ("key", "meaning", "serve.name", "kv.block_tokens"):
        assert part in out


def test_every_key_has_a_meaning() -> None:
    without = [key.key for key in config_keys(TandemConfig()) if not key.meaning.endswith(".")]
    assert not without, "put a sentence below the field in contracts/config"


def test_every_time_and_size_has_a_unit() -> None:
    units = {"_per_s": "per second", "_s": "seconds", "_bytes": "bytes"}
    for key in config_keys(TandemConfig()):
        ending = next((ending for ending in units if key.key.endswith(ending)), None)
        if ending is not None:
            assert units[ending] in key.meaning.lower(), key.key


def test_configuration_page_is_up_to_date() -> None:
    stored = TARGET.read_text(encoding="utf-8")
    assert stored == page(), "run `python -m cluster.cli.config_page`"
