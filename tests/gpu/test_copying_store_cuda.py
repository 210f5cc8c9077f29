"""Experts streamed to a GPU from pinned memory, on a stream of their own."""

from pathlib import Path

import pytest
import torch

from models.experts.copying_store import CopyingStore
from models.experts.expert_half import ExpertHalf
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import open_host_source
from models.weights.checkpoint import Checkpoint, check_checkpoint
from tests.support.group_harness import PrefillThreads, prefill_config
from tests.support.tiny_models import Checkpoints

SHARED_MEMORY = Path("/dev/shm")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def test_a_layer_is_whole_when_it_is_fetched_and_stays_so_while_it_is_read(
    tiny_checkpoint: Checkpoints,
) -> None:
    """Products are queued ahead: a buffer refilled too early gives results of another layer."""
    folder = tiny_checkpoint("qwen3_moe", num_hidden_layers=6)
    spec, device = check_checkpoint(folder), torch.device("cuda", 0)
    everyone = range(spec.num_experts)
    half = ExpertHalf.load(Checkpoint(folder), spec, everyone, dtype=torch.float32, device=device)
    layout = ExpertLayout(spec, torch.float32, device)
    source = open_host_source(folder, layout, store=SHARED_MEMORY / "tandem-test", deadline_s=60)
    store = CopyingStore(source, {0: half.layer_experts(0)}, layout, deadline_s=20)
    x = torch.randn(200_000, spec.hidden_size, device=device)
    try:
        for _ in range(3):
            found = [store.fetch(layer).gate_up[3](x) for layer in spec.moe_layers]
            for layer, product in zip(spec.moe_layers, found, strict=True):
                assert torch.equal(product, half.layer_experts(layer).gate_up[3](x)), layer
    finally:
        store.close()


def test_a_streamed_worker_gives_the_bits_of_a_resident_one(tiny_checkpoint: Checkpoints) -> None:
    folder, found = tiny_checkpoint("qwen3_moe"), []
    for experts in ("resident", "streamed"):
        config = prefill_config(
            prefill={"experts": experts, "host_store": str(SHARED_MEMORY / "tandem-test")}
        )
        with PrefillThreads(folder, config, device="cuda:0") as group, group.client() as client:
            scored = client.scored(client.submit(range(3, 100), candidates=list(range(131))))
            found.append(scored.candidate_logits)
    assert found[0] == found[1]
