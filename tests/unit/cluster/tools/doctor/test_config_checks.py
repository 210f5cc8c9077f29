"""`tandem doctor`: checks of a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.fleet.model_folder import resolve_model_folder
from cluster.tools.doctor.config_checks import check_config
from cluster.tools.doctor.findings import Finding
from cluster.tools.doctor.weight_bytes import group_weight_bytes, prefill_weight_bytes
from contracts.config import BUNDLED
from contracts.loading import load_config
from models.spec.model import read_spec

# One layer's experts of the bundled model: 16 of 3 * 192 * 96 elements, in bfloat16.
LAYER_BYTES = 16 * 3 * 192 * 96 * 2


def found(*settings: str) -> Finding:
    config = load_config(None, list(settings))
    return next(finding for finding in check_config(config, {}) if finding.check == "prefill")


def test_doctor_names_ranks_that_classify() -> None:
    assert found() == Finding(
        "prefill", "ok", "no prefill workers: attention and expert ranks classify"
    )


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("streamed", 1 + 2),
        ("gathered", 1 + 2 + 4 / 2),
        ("hybrid", 1 + 2 + 2 / 2),
        ("all_to_all", 5 / 2),
    ],
)
def test_prefill_weights_follow_mode_of_experts(kind: str, layers: float) -> None:
    spec = read_spec(resolve_model_folder(BUNDLED))
    settings = ["groups.prefill_ranks=2", "model.dtype=bfloat16"]
    all_of_them = prefill_weight_bytes(load_config(None, settings), spec)
    part = prefill_weight_bytes(load_config(None, [*settings, f"prefill.experts={kind}"]), spec)
    assert all_of_them - part == (5 - layers) * LAYER_BYTES


def test_single_gathering_worker_is_a_warning() -> None:
    finding = found("groups.prefill_ranks=1", "prefill.experts=gathered")
    assert finding.level == "warning"
    assert "resident or streamed" in finding.advice


def test_all_to_all_without_preemption_is_a_warning() -> None:
    def policy(*settings: str) -> Finding:
        config = load_config(None, ["groups.prefill_ranks=2", *settings])
        return next(finding for finding in check_config(config, {}) if finding.check == "policy")

    assert policy().level == "ok"
    assert policy("prefill.experts=all_to_all").level == "warning"
    assert "to their end" in policy("prefill.experts=all_to_all").found


def test_more_weights_than_memory_is_a_warning() -> None:
    finding = found("groups.prefill_ranks=1000000")
    assert finding.level == "warning"
    assert "fewer workers" in finding.advice


def test_two_workers_of_bundled_model_are_ok() -> None:
    assert found("groups.prefill_ranks=2").level == "ok"


def finding(check: str, environment: dict[str, str], *settings: str) -> Finding:
    config = load_config(None, list(settings))
    return next(one for one in check_config(config, environment) if one.check == check)


def test_weights_of_attention_and_expert_ranks_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ["model.dtype=bfloat16", "groups.attention_ranks=2", "groups.expert_ranks=2"]
    spec = read_spec(resolve_model_folder(BUNDLED))
    attention, experts = group_weight_bytes(load_config(None, settings), spec)
    assert experts == 5 * LAYER_BYTES
    assert finding("groups", {}, *settings).level == "ok"
    needed = 2 * attention + experts
    monkeypatch.setattr("contracts.machine.available_bytes", lambda: needed - 1)
    short = finding("groups", {}, *settings)
    assert (short.level, "fewer attention ranks" in short.advice) == ("warning", True)


def test_a_cluster_without_tokens_is_a_warning() -> None:
    for address in ([], ["groups.address=auto"]):
        open_ = finding("ray", {"RAY_AUTH_MODE": "disabled"}, *address)
        assert (open_.level, "RAY_AUTH_MODE=token" in open_.advice) == ("warning", True)
        assert finding("ray", {"RAY_AUTH_MODE": "token"}, *address).level == "ok"


def test_shadowing_modules_in_folder_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.py").touch()
    monkeypatch.chdir(tmp_path)
    found = finding("current folder", {})
    assert (found.level, "models.py" in found.found) == ("warning", True)


def test_unusable_hardware_file_is_an_error() -> None:
    found = finding("hardware", {}, "planner.hardware=/nowhere.json")
    assert (found.level, "/nowhere.json" in found.found) == ("error", True)
    assert finding("hardware", {}, "planner.hardware=h200-node").level == "ok"


def test_few_file_descriptors_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 4096))
    assert finding("descriptors", {}).level == "warning"
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, 65536))
    assert finding("descriptors", {}).level == "ok"


def test_folder_of_cached_experts_must_be_writable(tmp_path: Path) -> None:
    def experts(*settings: str) -> Finding:
        return finding("experts", {}, *settings)

    assert experts().found == "each worker holds all of its experts"
    cached = ["experts.slots=20", f"prefill.host_store={tmp_path}"]
    result = experts(*cached)
    assert result.level == "ok"
    assert result.found == f"a worker holds 20 of 80; it reads others from {tmp_path}"
    assert not list(tmp_path.iterdir())
    assert "experts.slots=1: room for 1" in experts("experts.slots=1", cached[1]).found
    missing = experts("experts.slots=20", f"prefill.host_store={tmp_path / 'none'}")
    assert missing.level == "error"
    assert "prefill.host_store" in missing.advice


def test_only_cached_experts_count_in_storage_format() -> None:
    spec = read_spec(resolve_model_folder(BUNDLED))
    common = ["groups.prefill_ranks=1", "model.dtype=float32"]
    slots = [*common, "experts.slots=16", "experts.storage_format=true"]

    def weights(*settings: str) -> int:
        return prefill_weight_bytes(load_config(None, list(settings)), spec)

    assert weights(*slots) == weights(*common), "of a worker that keeps all"
    cached = weights(*slots, "prefill.experts=cached")
    computed = weights(*common, "prefill.experts=cached", "experts.slots=16")
    assert computed - cached == LAYER_BYTES, "bfloat16 in place of float32"


def test_expert_budget_is_counted_and_too_small_one_is_an_error() -> None:
    spec = read_spec(resolve_model_folder(BUNDLED))
    settings = ["groups.prefill_ranks=1", "model.dtype=bfloat16", "prefill.experts=cached"]
    few, more = (
        prefill_weight_bytes(load_config(None, [*settings, f"experts.slots={slots}"]), spec)
        for slots in (16, 32)
    )
    assert more - few == LAYER_BYTES
    finding = found(*settings, "experts.slots=1")
    assert finding.level == "error"
    assert "give at least experts.slots=2" in finding.found


def test_gpu_experts_count_in_device_and_host_memory(tmp_path: Path) -> None:
    common = [
        "groups.device=cuda",
        "groups.expert_ranks=0",
        "groups.attention_ranks=0",
        "groups.prefill_ranks=1",
        "prefill.experts=cached",
        "model.dtype=float32",
        f"prefill.host_store={tmp_path}",
    ]

    def experts(*settings: str) -> Finding:
        return finding("experts", {}, *common, *settings)

    result = experts("experts.slots=20")
    assert result.level == "ok"
    assert result.found == (
        "a worker holds 20 of 80 on its GPU, 4 MiB; all are pinned in the host's memory, 17 MiB, "
        f"as a file in {tmp_path}"
    )
    assert "experts.slots=1: room for 1" in experts("experts.slots=1").found
    stored = experts("experts.slots=20", "experts.storage_format=true")
    assert stored.level == "error"
    assert stored.found.startswith("experts.storage_format=true: not on a GPU")
    ranks = experts("experts.slots=20", "groups.expert_ranks=1", "groups.attention_ranks=1")
    assert ranks.level == "error"
    assert ranks.found.startswith("groups.expert_ranks=1: expert ranks keep all")


def test_ipc_channels_are_a_warning() -> None:
    """CUDA leaves the memory of a killed process undefined, and recovery depends on it."""

    def gpu(*settings: str) -> Finding:
        findings = check_config(load_config(None, list(settings)), {})
        return next(finding for finding in findings if finding.check == "gpu")

    assert "ipc" not in gpu().found
    finding = gpu("channel.backend=ipc")
    assert finding.level == "warning"
    assert "a killed rank may corrupt packets in transit" in finding.advice
