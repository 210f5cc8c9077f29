"""Experts gathered from another process on the same GPU."""

import pytest
import torch

from models.experts.expert_layout import ExpertBuffer
from tests.support.prefill_workers import (
    layout_of,
    make_source,
    new_buffer,
    peer_process,
    worker_spec,
)
from tests.support.tiny_models import Checkpoints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("forked_processes"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def test_layers_come_from_another_process_and_after_its_end_from_the_checkpoint(
    tiny_checkpoint: Checkpoints,
) -> None:
    pytest.importorskip("cupy")
    folder = tiny_checkpoint("qwen3_moe", num_hidden_layers=4)
    layout = layout_of(folder, device="cuda:0")
    source = make_source(worker_spec(folder, 0, 2, backend="ipc"), layout=layout)
    whole = make_source(
        worker_spec(folder, 0, 1, backend="shm"), layout=layout_of(folder, packed=False)
    )
    with peer_process(folder, 1, 2, "ipc") as peer:
        source.listen("127.0.0.1")
        source.connect({"prefill-1": peer.address})
        for layer, fallbacks in ((1, 0), (2, 0), (3, 1)):
            if layer == 3:
                peer.process.kill()
                peer.process.wait(10)
            expected, found = new_buffer(folder, packed=False), ExpertBuffer(layout)
            whole.copy(layer, expected)
            source.copy(layer, found)
            assert source.fallbacks == fallbacks, source.lost
            for got, wanted in zip(found.pieces, expected.pieces, strict=True):
                assert torch.equal(got.cpu(), wanted)
    source.close()
    whole.close()
