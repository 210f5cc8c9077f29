"""`tandem profile`: what it measures, writes, reads back and draws.

No test depends on a duration; tests/property/test_fit.py covers the fits.
"""

import itertools
import json
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.planning import link_probe
from cluster.cli.main import main
from cluster.fleet.hardware import known_hardware, load_hardware
from cluster.tools.profile.hardware_profile import MAX_ATTEMPTS, _until_certain, batches
from contracts.errors import ConfigError
from contracts.hardware import Fit
from planner.costs.cost_model import attention_ms
from planner.costs.model_shape import batch_work, chunk_work, layer_mean_batch
from planner.costs.stage_fit import (
    AttentionSample,
    ExpertSample,
    ServingSample,
    SizedSample,
    fit_attention,
    fit_expert,
    fit_link,
    fit_serving,
)
from tests.support.fork_server import start_forked
from tests.support.model_shapes import DEEPSEEK_V2, QWEN3_235B, shape
from tests.support.tiny_models import Checkpoints

QWEN = shape(QWEN3_235B)


@pytest.fixture(scope="module")
def profiled(
    tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory, forked_processes: None
) -> tuple[Path, Path]:
    """Return (hardware file, plot) of a short run on a model with shared experts."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("profile")
    output, plot = folder / "here.json", folder / "here.svg"
    model = tiny_checkpoint("deepseek_v3")
    arguments = ["profile", "--model", str(model), "--seconds", "5", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        start_forked(patch, link_probe)
        assert main([*arguments, "--output", str(output), "--plot", str(plot)]) == 0
    return output, plot


@pytest.mark.long
def test_profile_has_fit_of_every_stage_link_and_direction(profiled: tuple[Path, Path]) -> None:
    hardware = load_hardware(str(profiled[0]))
    stages = [fit.stage for fit in hardware.fits]
    links = ["a2e shm", "e2a shm", "a2e tcp", "e2a tcp"]
    assert stages == ["attention", "shared", "expert", "serving", *links]
    assert all(len(fit.points) >= 3 for fit in hardware.fits)
    assert hardware.kind == "measured"


@pytest.mark.long
def test_profile_is_usable_as_hardware(
    profiled: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {
        "model": "bundled", "hardware": str(profiled[0]), "sequence_tokens": 64,
        "attention_ranks": 1, "expert_ranks": 1, "backend": "tcp",
    }  # fmt: skip
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec))
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_ms"] > 0


@pytest.mark.parametrize("name", known_hardware())
def test_packaged_hardware_files_are_valid_and_name_their_source(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.kind in ("printed", "public figures")
    assert len(hardware.source) > 40


def test_file_of_other_version_is_refused(tmp_path: Path) -> None:
    tree = msgspec.to_builtins(load_hardware("h200-node"))
    with pytest.raises(ConfigError, match=r"version=2.*tandem profile"):
        load_hardware({**tree, "version": 2})


@pytest.mark.parametrize("seconds", ["0", "nan", "-3", "1e9"])
def test_absurd_measurement_times_are_refused(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--seconds", seconds]) == 2
    assert "--seconds" in capsys.readouterr().err


def test_batches_cover_prompts_chunks_and_decode_within_context() -> None:
    found = batches(2048)
    assert all(stop <= 2048 for chunks in found for _, stop in chunks)
    kinds = {(start > 0, stop - start == 1) for chunks in found for start, stop in chunks}
    assert kinds == {(False, False), (True, False), (True, True), (False, True)}


costs = st.floats(1e-12, 1e-9)


@settings(deadline=None, max_examples=30)
@given(st.floats(0.01, 1.0), st.floats(0.001, 0.1), costs, costs, st.booleans())
def test_fit_of_profile_batches_predicts_ragged_batches(
    call: float, sequence: float, linear: float, attended: float, latent: bool
) -> None:
    """The model computes the times: the design of the batches determines its coefficients."""
    model = shape(DEEPSEEK_V2) if latent else QWEN

    def ms(chunks: list[tuple[int, int]]) -> float:
        works = [chunk_work(model, start, stop, None) for start, stop in chunks]
        return call + sum(
            sequence + linear * work.linear_flops + attended * work.attended_flops for work in works
        )

    measured = [AttentionSample("", chunks, None, ms(list(chunks))) for chunks in batches(8192)]
    cost, fit = fit_attention(model, measured)
    ragged = [(0, 13), (0, 700), (1000, 1001), (4000, 4100), (77, 78)]
    assert fit.r2 > 0.999
    found = attention_ms(cost, model, layer_mean_batch(model, ragged))
    assert found == pytest.approx(ms(ragged), rel=0.02)


def test_packet_and_copy_costs_are_separated_from_one_rank_cost() -> None:
    row_bytes = QWEN.hidden_size * QWEN.element_bytes

    def sample(tokens: int, ranks: int, copies: float) -> AttentionSample:
        work = chunk_work(QWEN, 0, tokens, None)
        alone = 0.5 + 1e-9 * work.linear_flops + 1e-9 * work.attended_flops
        sent = 0.2 * (ranks - 1) + 1e-6 * (copies - 1) * tokens * row_bytes
        return AttentionSample("", [(0, tokens)], None, alone + sent, ranks, copies)

    one = [sample(tokens, 1, 1.0) for tokens in (16, 64, 256, 1024, 4096)]
    four = [sample(tokens, 4, 2.5) for tokens in (16, 256, 1024)]
    cost, _ = fit_attention(QWEN, one + four)
    assert cost.packet_ms == pytest.approx(0.2, rel=1e-3)
    assert cost.copied_ms_per_byte == pytest.approx(1e-6, rel=1e-3)
    alone, _ = fit_attention(QWEN, one)
    assert (alone.packet_ms, alone.copied_ms_per_byte) == (0.0, 0.0)


def test_profile_batches_separate_call_cost_from_sequence_cost() -> None:
    def ms(chunks: tuple[tuple[int, int], ...]) -> float:
        work = batch_work(QWEN, chunks, None)
        spent = 0.5 + 0.01 * work.sequences + 1e-11 * (work.linear_flops + work.attended_flops)
        return spent + 0.2 * work.prompt_calls + 0.1 * work.decode_calls

    measured = [AttentionSample("", chunks, None, ms(chunks)) for chunks in batches(8192)]
    cost, _ = fit_attention(QWEN, measured)
    assert cost.sequence_ms == pytest.approx(0.01, rel=0.02)
    assert cost.prompt_call_ms == pytest.approx(0.2, rel=0.02)
    assert cost.decode_call_ms == pytest.approx(0.1, rel=0.02)


def test_serving_fit_excludes_logits() -> None:
    attention = load_hardware("h200-node").attention
    logits = 2.0 * QWEN.hidden_size * QWEN.vocab_size * attention.linear_ms_per_flop
    samples = [
        ServingSample(
            "",
            cut,
            count,
            count * tokens,
            0.4 + 0.6 * cut + (0.05 + logits + 0.002 * tokens) * count,
        )
        for count, tokens in ((1, 64), (16, 64), (64, 16), (4, 512))
        for cut in (1, 2)
    ]
    cost, fit = fit_serving(QWEN, attention, samples)
    found = (cost.batch_ms, cost.micro_batch_ms, cost.sequence_ms, cost.token_ms)
    assert found == pytest.approx((0.4, 0.6, 0.05, 0.002), rel=1e-3)
    assert fit.r2 == pytest.approx(1.0)


def test_expert_and_link_fits_recover_coefficients() -> None:
    experts = [
        ExpertSample("", active, active * each, 0.3 + 0.05 * active + 1e-4 * active * each)
        for active in (1, 4, 16)
        for each in (1, 8, 64, 512)
    ]
    cost, fit = fit_expert(QWEN, experts)
    assert cost.call_ms == pytest.approx(0.3, rel=1e-3)
    assert cost.expert_ms == pytest.approx(0.05, rel=1e-3)
    assert cost.ms_per_flop * QWEN.pair_flops == pytest.approx(1e-4, rel=1e-3)
    link, _ = fit_link(
        "tcp", "a2e", [SizedSample("", n, 0.1 + 1e-6 * n) for n in (10, 10**4, 10**6)]
    )
    assert (link.alpha_ms, link.ms_per_byte) == pytest.approx((0.1, 1e-6))
    assert fit.r2 == pytest.approx(1.0)


def noisy_experts(seed: int, noise: float) -> list[ExpertSample]:
    """Return times that hardly depend on FLOPs, as on a busy machine."""
    rng = random.Random(seed)
    return [
        ExpertSample(
            str(pairs), active=4.0, pairs=pairs, ms=1.0 + noise * rng.random() - pairs * 1e-5
        )
        for pairs in (1, 16, 256, 4096)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_vanished_slope_is_bounded_from_below_and_uncertain(seed: int) -> None:
    cost, fit = fit_expert(QWEN, noisy_experts(seed, noise=0.01))
    assert fit.uncertain
    assert 0 < cost.ms_per_flop * 4096 * QWEN.pair_flops < 0.1
    assert fit.median_error_fraction < 0.1


@pytest.mark.parametrize(("vanishing", "measured"), [(0, 1), (1, 2), (9, MAX_ATTEMPTS)])
def test_uncertain_fit_is_measured_again(vanishing: int, measured: int) -> None:
    attempts = itertools.count()

    def measure() -> list[Fit]:
        uncertain = next(attempts) < vanishing
        return [
            Fit(stage="a", size_unit="b", r2=1.0, median_error_fraction=0.0, uncertain=uncertain)
        ]

    fits = _until_certain(measure, lambda found: found)
    assert next(attempts) == measured
    assert fits[0].uncertain == (vanishing >= MAX_ATTEMPTS)
