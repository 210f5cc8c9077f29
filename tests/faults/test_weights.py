"""A peer that dies or hangs while experts are gathered from it."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import actors.gather.peer_source
from actors.gather.peer_source import PeerSource
from models.experts.expert_layout import ExpertBuffer
from tests.support.group_harness import group_config, until
from tests.support.prefill_workers import (
    Peer,
    assert_layer,
    make_source,
    new_buffer,
    peer_process,
    worker_spec,
)
from tests.support.tiny_models import Checkpoints

pytestmark = pytest.mark.usefixtures("forked_processes")
SEEN_WITHIN_S = 10.0
TIMEOUT_S = 20.0


@contextmanager
def worker_and_peer(folder: Path, backend: str) -> Iterator[tuple[PeerSource, Peer]]:
    config = group_config(
        prefill={"experts": "gathered"},
        channel={"heartbeat_timeout_s": 1.0, "heartbeat_interval_s": 0.2},
    )
    with peer_process(folder, 1, 2, backend) as peer:
        source = make_source(worker_spec(folder, 0, 2, backend=backend, config=config))
        source.listen("127.0.0.1")
        source.connect({"prefill-1": peer.address})
        yield source, peer
        source.close()


def copied(source: PeerSource, folder: Path, layer: int) -> ExpertBuffer:
    buffer = new_buffer(folder)
    source.copy(layer, buffer)
    assert_layer(folder, buffer, layer)
    return buffer


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_hung_peer_is_replaced_by_the_fallback_and_rejoined(
    tiny_checkpoint: Checkpoints, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.gather.peer_source, "REDIAL_S", 0.1)
    folder = tiny_checkpoint("qwen3_moe")
    with worker_and_peer(folder, backend) as (source, peer):
        copied(source, folder, 1)
        peer.stop()
        start_s = time.monotonic()
        copied(source, folder, 2)
        assert time.monotonic() - start_s < SEEN_WITHIN_S
        assert source.lost == {"prefill-1": "prefill-1 sent nothing for 1 s"}
        copied(source, folder, 1)
        assert source.fallbacks == 2
        peer.process.send_signal(signal.SIGCONT)
        until(lambda: copied(source, folder, 1) is not None and not source.lost)
        before = source.fallbacks
        copied(source, folder, 2)
        assert source.fallbacks == before
        kill_while_gathering(source, peer, folder)
        assert source.fallbacks == before + 1


def kill_while_gathering(source: PeerSource, peer: Peer, folder: Path) -> None:
    peer.stop()  # so that it does not answer before it is killed
    gathering = threading.Thread(target=copied, args=(source, folder, 2))
    start_s = time.monotonic()
    gathering.start()
    peer.process.send_signal(signal.SIGKILL)
    gathering.join(TIMEOUT_S)
    assert "prefill-1" in source.lost["prefill-1"]
    assert time.monotonic() - start_s < SEEN_WITHIN_S
