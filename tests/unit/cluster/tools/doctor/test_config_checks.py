"""`tandem doctor`: checks of a configuration."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster.fleet.model_folder import resolve_model_folder
from cluster.tools.doctor.config_checks import check_config, check_gpu_environment
from cluster.tools.doctor.findings import Finding
from cluster.tools.doctor.rank_checks import group_weight_bytes, prefill_weight_bytes
from contracts import machine
from contracts.config import BUNDLED
from contracts.loading import load_config
from models.spec.model import read_spec

# One layer's experts of the bundled model: 16 of 3 * 192 * 96 elements, in bfloat16.
LAYER_BYTES = 16 * 3 * 192 * 96 * 2


def finding(check: str, *settings: str, environment: dict[str, str] | None = None) -> Finding:
    findings = check_config(load_config(None, list(settings)), environment or {})
    return next(each for each in findings if each.check == check)


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
    result = finding("prefill", "groups.prefill_ranks=1", "prefill.experts=gathered")
    assert result.level == "warning"
    assert "resident or streamed" in result.advice


def test_all_to_all_without_preemption_is_a_warning() -> None:
    def policy(*settings: str) -> Finding:
        return finding("policy", "groups.prefill_ranks=2", *settings)

    assert policy().level == "ok"
    assert policy("prefill.experts=all_to_all").level == "warning"
    assert "to their end" in policy("prefill.experts=all_to_all").found


def test_weights_of_attention_and_expert_ranks_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ["model.dtype=bfloat16", "groups.attention_ranks=2", "groups.expert_ranks=2"]
    spec = read_spec(resolve_model_folder(BUNDLED))
    attention, experts = group_weight_bytes(load_config(None, settings), spec)
    assert experts == 5 * LAYER_BYTES
    assert finding("groups", *settings).level == "ok"
    needed = 2 * attention + experts
    monkeypatch.setattr("contracts.machine.available_bytes", lambda: needed - 1)
    short = finding("groups", *settings)
    assert (short.level, "fewer attention ranks" in short.advice) == ("warning", True)


def test_a_cluster_without_tokens_is_a_warning() -> None:
    for address in ([], ["groups.address=auto"]):
        open_ = finding("ray", *address, environment={"RAY_AUTH_MODE": "disabled"})
        assert (open_.level, "RAY_AUTH_MODE=token" in open_.advice) == ("warning", True)
        assert finding("ray", *address, environment={"RAY_AUTH_MODE": "token"}).level == "ok"


def test_shadowing_modules_in_folder_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.py").touch()
    monkeypatch.chdir(tmp_path)
    found = finding("current folder")
    assert (found.level, "models.py" in found.found) == ("warning", True)


def test_unusable_hardware_file_is_an_error() -> None:
    found = finding("hardware", "planner.hardware=/nowhere.json")
    assert (found.level, "/nowhere.json" in found.found) == ("error", True)
    assert finding("hardware", "planner.hardware=h200-node").level == "ok"


def test_folder_of_cached_experts_must_be_writable(tmp_path: Path) -> None:
    def experts(*settings: str) -> Finding:
        return finding("experts", *settings)

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
        return finding("experts", *common, *settings)

    result = experts("experts.slots=20")
    assert result.level == "ok"
    assert result.found == (
        "a worker holds 20 of 80 on its GPU, 4 MiB; all are pinned in the host's memory, 17 MiB, "
        f"as a file in {tmp_path}"
    )
    assert "experts.slots=1: room for 1" in experts("experts.slots=1").found


def test_gpu_without_compiler_or_with_two_cuda_majors_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", "/nowhere")
    assert finding("gpu kernels").found == "no C compiler"
    assert finding("gpu kernels", environment={"CC": "tcc"}).found != "no C compiler"
    assert "pip install -e '.[cuda13]'" in finding("gpu").advice
    nccl = SimpleNamespace(available=True, get_version=lambda: 22700)
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 12090)
    cuda = SimpleNamespace(nccl=nccl, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    mixed = finding("gpu")
    assert mixed.level == "error"
    assert "torch is built for CUDA 13, cupy for CUDA 12" in mixed.found
    monkeypatch.setattr(runtime, "runtimeGetVersion", lambda: 13000)
    assert finding("gpu") == Finding(
        "gpu", "ok", "NVIDIA H100, NVIDIA H100; CUDA 13, cupy NCCL 22700"
    )


def test_gpu_environment_shows_the_settings_and_warns_of_others() -> None:
    ours = check_gpu_environment({})
    assert (ours.level, "CUDA_MODULE_LOADING=EAGER" in ours.found) == ("ok", True)
    lazy = check_gpu_environment({"CUDA_MODULE_LOADING": "LAZY"})
    assert lazy.level == "warning"
    assert lazy.advice == "Tandem's own value is EAGER: unset CUDA_MODULE_LOADING"


def test_ipc_channels_are_a_warning() -> None:
    """CUDA leaves the memory of a killed process undefined, and recovery depends on it."""

    assert "ipc" not in finding("gpu").found
    risky = finding("gpu", "channel.backend=ipc")
    assert risky.level == "warning"
    assert "a killed rank may corrupt packets in transit" in risky.advice


MIB = 1 << 20
EXPERT_BYTES = 3 * 192 * 96 * 2  # of the bundled model, in bfloat16
RANK_BYTES = 5 * 8 * EXPERT_BYTES  # half of the experts of its five layers


@pytest.fixture(autouse=True)
def machine_of_known_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 100 * MIB)


def moves(*settings: str) -> Finding:
    common = ["groups.expert_ranks=2", "placement.rebalance=continuous", "model.dtype=bfloat16"]
    common.append("placement.spare_slots=0")
    return finding("moves", *common, *settings)


def test_move_within_all_limits_is_ok_and_bounded_by_slots() -> None:
    result = moves(f"placement.bytes_per_s={4 * RANK_BYTES}")
    assert (result.level, result.advice) == ("ok", "")
    assert f"at most {RANK_BYTES / MIB:.0f} MiB into a rank, in 0.25 s" in result.found


@pytest.mark.parametrize(
    ("settings", "level", "advice"),
    [
        (["max_move_bytes=1000"], "error", f"give {EXPERT_BYTES} or more"),
        (
            ["bytes_per_s=100000", "move_timeout_s=30"],
            "warning",
            "set max_move_bytes to 3000000 or less",
        ),
    ],
)
def test_limits_that_do_not_fit_are_reported_with_remedy(
    settings: list[str], level: str, advice: str
) -> None:
    result = moves(*(f"placement.{each}" for each in settings))
    assert result.level == level
    assert advice in result.advice


def test_moves_beyond_free_memory_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * RANK_BYTES)
    assert moves().level == "ok"
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * RANK_BYTES - 1)
    result = moves()
    assert result.level == "warning"
    assert f"set max_move_bytes to {RANK_BYTES - 1} or less" in result.advice


def test_fixed_or_cached_experts_have_no_limits() -> None:
    assert moves('placement.rebalance="off"') == Finding(
        "moves", "ok", "none: experts stay where they are"
    )
    bounded = moves("experts.slots=20")
    assert bounded.level == "ok"
    assert "read experts on demand" in bounded.found
