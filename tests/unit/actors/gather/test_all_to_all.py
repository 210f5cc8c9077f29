"""The DP+EP baseline: equal logits, and lost peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.channels.factory import make_endpoint
from actors.gather.all_to_all import AllToAll
from actors.ranks.rendezvous import contiguous_placements
from actors.telemetry.timeline import Timeline
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import PeerError
from contracts.ranks import Group
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import ExpertHalf
from models.weights.checkpoint import Checkpoint, check_checkpoint
from tests.support.local_model import LocalModel

Checkpoints = Callable[..., Path]
JOIN_S = 60.0
SEEN_WITHIN_S = 10.0
CPU = torch.device("cpu")


class Worker:
    """A baseline worker that runs batches without a rank around it."""

    def __init__(self, folder: Path, rank: int, workers: int, backend: str, **channel: Any) -> None:
        self.model = check_checkpoint(folder)
        names = [f"prefill-{number}" for number in range(workers)]
        fields: dict[str, Any] = {"backend": backend, "heartbeat_timeout_s": 20.0, **channel}
        config = ChannelConfig(**fields)
        self.endpoint = make_endpoint(
            name=names[rank], token=b"t" * 32, epoch=1, config=config, clock=monotonic_s, device=CPU
        )
        self.address = self.endpoint.listen("127.0.0.1")
        placement = contiguous_placements(str(folder), prefill_ranks=workers)[Group.PREFILL]
        own_ids = placement.experts_of(rank)
        checkpoint = Checkpoint(folder)
        experts = ExpertHalf.load(checkpoint, self.model, own_ids, dtype=torch.float32)
        self.all_to_all = AllToAll(
            self.endpoint, names, experts, placement, Timeline(0), monotonic_s
        )
        attention = AttentionHalf.load(checkpoint, self.model, dtype=torch.float32)
        self.local = LocalModel(attention, [])
        self.nothing = torch.empty(0, self.model.hidden_size)

    @torch.inference_mode()
    def run(self, ids: list[int] | None) -> torch.Tensor | None:
        """Logits after the last token; None: take part without a batch."""
        if ids is None:
            end_s = time.monotonic() + JOIN_S
            while not self.all_to_all.wait_for_pass(0.1):
                assert time.monotonic() < end_s
            for layer in self.model.moe_layers:
                self.all_to_all.participate(layer, self.nothing)
            self.all_to_all.end_pass()
            return None
        half, blocks = self.local.attention, -(-len(ids) // 16)
        kv = self.local.new_pool(blocks)
        batch = AttentionBatch.build([SequenceSlice(ids, 0, range(blocks))], block_tokens=16)
        hidden_TD = half.embed(batch)
        for layer in range(self.model.num_layers):
            attended = half.attend(layer, hidden_TD, batch, kv)
            hidden_TD = attended.hidden_TD
            if attended.routed is not None:
                hidden_TD += self.all_to_all.sums(layer, attended.routed)
                shared_TD = half.shared(layer, attended.routed.x_TD)
                hidden_TD += 0 if shared_TD is None else shared_TD
        self.all_to_all.end_pass()
        return half.logits(hidden_TD[-1:])[0]


def make_workers(
    stack: ExitStack, folder: Path, count: int, backend: str, **channel: Any
) -> list[Worker]:
    workers = [Worker(folder, rank, count, backend, **channel) for rank in range(count)]
    for worker in workers:
        stack.callback(worker.endpoint.close)
    addresses = {worker.endpoint.name: worker.address for worker in workers}
    for worker in workers:
        worker.all_to_all.connect(addresses)
    return workers


def run_all(
    workers: Sequence[Worker], passes: Sequence[Sequence[list[int] | None]]
) -> list[list[torch.Tensor | None]]:
    """Run the workers; return each one's answers in order."""
    answers: list[list[torch.Tensor | None]] = [[] for _ in workers]

    def work(rank: int) -> None:
        for batches in passes:
            answers[rank].append(workers[rank].run(batches[rank]))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    return answers


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "backend"),
    [("qwen3_moe", "shm"), ("mixtral", "tcp"), ("deepseek_v3", "tcp"), ("gpt_oss", "shm")],
)
def test_logits_equal_resident_ones_for_busy_and_idle_workers(
    tiny_checkpoint: Checkpoints, family: str, backend: str
) -> None:
    folder = tiny_checkpoint(family)
    local = LocalModel.load(folder, dtype="float32")
    first, second, third = [5, 9, 2, 77], list(range(3, 40)), [11]
    runs: dict[int, list[list[list[int] | None]]] = {
        1: [[first], [second]],
        2: [[first, second], [None, third], [second, None], [third, first]],
        3: [[first, second, third], [None, None, second], [third, None, first]],
    }
    for count, passes in runs.items():
        with ExitStack() as stack:
            answers = run_all(make_workers(stack, folder, count, backend), passes)
        for number, batches in enumerate(passes):
            for rank, ids in enumerate(batches):
                found = answers[rank][number]
                if ids is None:
                    assert found is None
                    continue
                (expected,) = local.forward([ids])
                torch.testing.assert_close(found, expected[-1], atol=1e-5, rtol=0)


def test_peer_lost_during_a_pass_is_reported_at_once(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    with ExitStack() as stack:
        workers = make_workers(stack, folder, 2, "tcp")
        run_all(workers, [[[5, 6], [7]]])
        errors: list[PeerError] = []

        def work() -> None:
            try:
                workers[0].run([5, 6])
            except PeerError as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        end_s = time.monotonic() + JOIN_S
        while not workers[1].all_to_all.wait_for_pass(1.0):  # whatever arrives ends its wait
            assert time.monotonic() < end_s
        with torch.inference_mode():
            workers[1].all_to_all.participate(workers[1].model.moe_layers[0], workers[1].nothing)
        start_s = time.monotonic()
        workers[1].endpoint.close()
        thread.join(JOIN_S)
        assert time.monotonic() - start_s < SEEN_WITHIN_S
        assert [error.peer for error in errors] == ["prefill-1"]
        with pytest.raises(PeerError, match="prefill-1"):
            workers[0].run([5])
