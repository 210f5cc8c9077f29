"""`tandem plan`: answers, files, and one error line with the field's name."""

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.cli.main import main
from cluster.fleet.hardware import load_hardware
from cluster.fleet.model_folder import resolve_model_folder
from contracts.json_input import MAX_BYTES
from tests.support.model_shapes import QWEN3_235B
from tests.support.one_line_errors import error_line, printed_error

STAGES: dict[str, Any] = {
    "stages": {
        "attention": {"alpha_ms": 0.2, "beta_ms": 1.5},
        "shared": {"alpha_ms": 0.1, "beta_ms": 0.4},
        "expert": {"alpha_ms": 0.5, "beta_ms": 0.02},
        "link": {"alpha_ms": 0.1, "beta_ms": 0.01},
    },
    "tokens_per_expert_per_sample": 64,
    "num_layers": 24,
    "max_samples": 8,
    "max_r2": 16,
    "has_shared": True,
}
MODEL: dict[str, Any] = {
    "model": QWEN3_235B,
    "hardware": "h200-node",
    "sequence_tokens": 2048,
    "attention_ranks": 3,
    "expert_ranks": 5,
}
BUNDLED_FOLDER = resolve_model_folder("bundled")
PROFILE = str(BUNDLED_FOLDER / "routing.safetensors")
ROUTED: dict[str, Any] = {
    "model": "bundled",
    "hardware": "h200-node",
    "sequence_tokens": 256,
    "attention_ranks": 2,
    "expert_ranks": 2,
    "max_samples": 64,
    "routing": PROFILE,
}
Captured = pytest.CaptureFixture[str]


def plan(tmp_path: Path, tree: object, *options: str) -> int:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(tree))
    return main(["plan", str(path), *options])


def changed(tree: dict[str, Any], dotted: str, value: object) -> dict[str, Any]:
    """Return a copy with one field set, or without it for `...`."""
    result = copy.deepcopy(tree)
    *path, last = dotted.split(".")
    node = result
    for key in path:
        node = node[key]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return result


def solved(tmp_path: Path, capsys: Captured, tree: object) -> dict[str, Any]:
    assert plan(tmp_path, tree, "--json") == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_stages_spec_gives_plan_and_baselines(tmp_path: Path, capsys: Captured) -> None:
    answer = solved(tmp_path, capsys, STAGES)
    assert {"ma", "r1", "me", "r2", "order", "makespan_ms", "samples_per_s", "lower_bound_ms",
            "solve_ms", "baselines"} <= set(answer)  # fmt: skip
    assert answer["me"] == answer["ma"] * 64 / answer["r2"]
    assert answer["lower_bound_ms"] <= answer["makespan_ms"]
    rates = [answer["baselines"][name]["samples_per_s"] for name in ("naive", "pppipe")]
    assert rates[0] <= rates[1] <= answer["samples_per_s"]


def test_model_spec_gives_verdict(tmp_path: Path, capsys: Captured) -> None:
    answer = solved(tmp_path, capsys, MODEL)
    assert (answer["attention_ranks"], answer["expert_ranks"]) == (3, 5)
    names = {other["name"] for other in answer["alternatives"]}
    assert names == {"colocated DP+EP", "weight gathering"}
    assert isinstance(answer["disaggregate"], bool)
    assert answer["ma"] * answer["r1"] <= answer["max_samples"]


def test_offload_gives_times_per_token(tmp_path: Path, capsys: Captured) -> None:
    spec = {**MODEL, "offload": {"kept": 0.25, "tier_bytes_per_s": 5e10}}
    answer = solved(tmp_path, capsys, spec)
    assert [row["sequences"] for row in answer["offload"]] == [1, 2, 4, 8, 16]
    for row in answer["offload"]:
        assert row["resident_ms"] < row["ahead_ms"] < row["on_demand_ms"]
    assert "From 5 sequence(s) on" in answer["offload_advice"]
    assert plan(tmp_path, spec) == 0
    assert "prefetched, at best" in capsys.readouterr().out
    half = {"kept": 0.5, "tier_bytes_per_s": 5e10, "stored_bits_per_weight": 8}
    stored = solved(tmp_path, capsys, {**MODEL, "offload": half})
    assert all(row["missing"] == 0.0 for row in stored["offload"])
    assert "none is read" in stored["offload_advice"]
    assert plan(tmp_path, MODEL, "--json") == 0
    assert "offload" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("given", ["attention_ranks", "expert_ranks"])
def test_ranks_of_one_group_and_devices_are_a_split(
    tmp_path: Path, capsys: Captured, given: str
) -> None:
    other = {"attention_ranks": "expert_ranks", "expert_ranks": "attention_ranks"}[given]
    whole = solved(tmp_path, capsys, MODEL)
    tree = changed(changed(MODEL, other, ...), "devices", 8)
    answer = solved(tmp_path, capsys, tree)
    assert answer.pop("solve_ms") > 0
    assert whole.pop("solve_ms") > 0
    assert answer == whole


def test_plan_is_drawn_and_traced(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "plan.svg", tmp_path / "plan.json"
    assert plan(tmp_path, STAGES, "--picture", str(picture), "--trace", str(trace)) == 0
    assert "<svg" in picture.read_text()
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"attention L0 m0", "shared L0 m0", "expert L23 m0 g0"} <= names


WRONG_STAGES: list[tuple[dict[str, object], str]] = [
    ({"stages.attention": ...}, "attention"),
    ({"stages.attention.beta_ms": -1}, "beta_ms"),
    ({"stages.expert.beta_ms": "fast"}, "beta_ms"),
    ({"stages.expert.alpha_ms": 1e300}, "alpha_ms"),
    ({"stages.link": ...}, "link"),
    ({"stages.links": {"alpha_ms": 1, "beta_ms": 1}}, "links"),
    ({"tokens_per_expert_per_sample": 0}, "tokens_per_expert_per_sample"),
    ({"max_r2": 2.5}, "max_r2"),
]
WRONG_MODEL: list[tuple[dict[str, object], str]] = [
    ({"model": ...}, "model"),
    ({"model": "no/such/folder"}, "no such folder"),
    ({"model": {}}, "model_type"),
    ({"model.num_experts": 0}, "num_experts"),
    ({"model.hidden_size": 10**30}, "hidden_size"),
    ({"model.num_experts_per_tok": 129}, "num_experts_per_tok"),
    ({"model.num_experts": 4, "model.num_experts_per_tok": 2}, "expert_ranks=5"),
    ({"hardware": "tpu-v9"}, "h200-node"),
    ({"hardware": {"version": 1}}, "missing"),
    ({"sequence_tokens": 40961}, "sequence_tokens"),
    ({"attention_ranks": ...}, "attention_ranks"),
    ({"expert_ranks": 200}, "devices"),
    ({"expert_ranks": 1}, "or more would fit"),
    ({"devices": 7}, "3 attention_ranks and 5 expert_ranks are not the 7 of devices"),
    ({"expert_ranks": ..., "devices": 3}, "3 attention_ranks and 0"),
    ({"memory_bytes": 10**6}, "memory_bytes"),
    ({"memory_fraction": 1.5}, "memory_fraction"),
    ({"backend": "pigeon"}, "pigeon"),
    ({"dtype": "int3"}, "dtype"),
    ({"sequence_length": 5}, "sequence_length"),
    ({"offload": {"kept": 1.0, "tier_bytes_per_s": 1e9}}, "kept"),
    ({"offload": {"kept": 0.5}}, "tier_bytes_per_s"),
    ({"offload": {"kept": 0.5, "tier_bytes_per_s": 1e9, "hits": 2}}, "hits"),
]
WRONG_ROUTING: list[tuple[dict[str, object], str]] = [
    ({"routing": "no/such.file"}, "no/such.file"),
    ({"routing": str(BUNDLED_FOLDER / "config.json")}, "config.json"),
    ({"spare_slots": 9}, "spare_slots: 9 beside a rank's share of 8 or more of 16 experts"),
    ({"spare_slots": -1}, "spare_slots"),
    ({"routing": ..., "spare_slots": 1}, "spare_slots: 1 without routing"),
    ({"model": QWEN3_235B}, "give model as its folder"),
]
WRONG = [
    *((STAGES, fields, named) for fields, named in WRONG_STAGES),
    *((MODEL, fields, named) for fields, named in WRONG_MODEL),
    *((ROUTED, fields, named) for fields, named in WRONG_ROUTING),
]


@pytest.mark.parametrize(("tree", "fields", "named"), WRONG)
def test_invalid_field_is_one_line_with_its_name(
    tree: dict[str, Any], fields: dict[str, object], named: str, tmp_path: Path, capsys: Captured
) -> None:
    for name, value in fields.items():
        tree = changed(tree, name, value)
    assert plan(tmp_path, tree) == 2
    assert named in printed_error(capsys, "plan")


UNREADABLE = {
    "empty": b"",
    "NaN": json.dumps(STAGES).replace("1.5", "NaN").encode(),
    "overflow": json.dumps(STAGES).replace("1.5", "1e999").encode(),
    "bytes": b"\xff\xfe{}",
    "deep": b'{"a":' * 100_000,
    "deep inside": b'{"stages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "huge": b" " * (MAX_BYTES + 1),
}


@pytest.mark.parametrize("kind", [*UNREADABLE, "missing", "a folder"])
def test_unreadable_spec_file_is_one_line(kind: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path if kind == "a folder" else tmp_path / "spec.json"
    if kind in UNREADABLE:
        path.write_bytes(UNREADABLE[kind])
    error_line(capsys, "plan", str(path))


@pytest.mark.parametrize("option", ["--picture", "--trace"])
def test_unwritable_file_is_one_line(option: str, tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    assert plan(tmp_path, STAGES, option, str(tmp_path / "no" / "plan.svg")) == 2
    assert option in printed_error(capsys, "plan")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def fields_of(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += fields_of(value, f"{prefix}{key}.")
    return found


@pytest.mark.long
@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_field_value_gives_plan_or_one_line(
    data: st.DataObject, tmp_path: Path, capsys: Captured
) -> None:
    tree = data.draw(st.sampled_from([STAGES, MODEL]))
    field = data.draw(st.sampled_from(fields_of(tree)))
    status = plan(tmp_path, changed(tree, field, data.draw(values)), "--json")
    if status == 0:
        assert json.loads(capsys.readouterr().out)["makespan_ms"] > 0
    else:
        assert status == 2
        printed_error(capsys, "plan")


@pytest.mark.long
def test_profile_reports_gain_of_placement(tmp_path: Path, capsys: Captured) -> None:
    """Copies of the bundled model on 2 ranks: 1.48 in order, 1.33 at best."""
    answer = solved(tmp_path, capsys, ROUTED)
    routing = answer["routing"]
    assert 1.44 < routing["in_order_copies"] < 1.52
    assert 1.30 < routing["copies"] < 1.38
    gain = answer["samples_per_s"] / routing["in_order_samples_per_s"] - 1
    assert routing["gain_fraction"] == pytest.approx(gain)
    spare = solved(tmp_path, capsys, {**ROUTED, "spare_slots": 2})["routing"]
    assert spare["copies"] < 1.2
    assert spare["spare_slots"] == 2


# --- what ranks do beside their layers, and cores that they share


def here(**changes: Any) -> dict[str, Any]:
    """Return a machine of two cores as `tandem profile` writes it."""
    tree: dict[str, Any] = json.loads(msgspec.json.encode(load_hardware("h200-node")))
    return {**tree, "devices": 2, "shareable": True, "memory_bytes": 1 << 33, **changes}


def answered(tmp_path: Path, capsys: Captured, **fields: Any) -> dict[str, Any]:
    spec = {
        "model": "bundled",
        "hardware": here(),
        "sequence_tokens": 256,
        "attention_ranks": 1,
        "expert_ranks": 1,
        "max_samples": 64,
        **fields,
    }
    return solved(tmp_path, capsys, spec)


def test_plan_reports_more_ranks_than_cores(tmp_path: Path, capsys: Captured) -> None:
    enough = answered(tmp_path, capsys, expert_ranks=3, hardware=here(devices=4))
    too_few = answered(tmp_path, capsys, expert_ranks=3)
    assert "assume a core for each of 4 ranks" in too_few["advice"]
    assert "assume a core" not in enough["advice"]
    assert too_few["makespan_ms"] == enough["makespan_ms"]
