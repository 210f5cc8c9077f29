"""Loss, hangs, bad clients and failed starts of an attention/expert group.

Real ranks, channels and processes, without Ray. Every wait has a deadline; faults occur within a
batch.
"""

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.moe.rank_experts import CachedExperts
from actors.offload.file_tier import FileTier
from actors.ranks.expert_rank import ExpertLoop
from actors.ranks.rank import Rank
from actors.ranks.rendezvous import GroupSpec, Seat, contiguous_placements, form_group, make_specs
from contracts.config import TandemConfig
from contracts.errors import ChannelError, CheckpointError, LaunchError, ResourceError
from contracts.messages import Failed, Tokens
from contracts.ranks import RankSpec
from contracts.requests import Priority
from kernels.steps import Steps
from models.experts.expert_cache import ExpertCache
from models.experts.expert_half import ExpertHalf
from tests.support.channels_support import nothing_leaks  # noqa: F401
from tests.support.group_harness import (
    DEADLINE_S,
    RankConnection,
    ThreadGroup,
    connections,
    experts_of,
    greedy,
    group_config,
    half_of,
    until,
)
from tests.support.local_group import LocalGroup
from tests.support.local_model import LocalModel
from tests.support.rank_process import RankProcess
from tests.support.tiny_models import Checkpoints, prompt

pytestmark = pytest.mark.usefixtures("ranks_are_forked")
BACKENDS = ["shm", "tcp"]
LIMIT_S = 10.0  # from a fault to the last error that it causes
LONG_TOKENS = 3500  # one batch of this lasts longer than LIMIT_S


@pytest.fixture(scope="session")
def deep(tiny_checkpoint: Checkpoints) -> Path:
    """Return a model of many thin layers, so that faults occur within a batch."""
    return tiny_checkpoint(
        "qwen3_moe", num_hidden_layers=24, num_experts=8, max_position_embeddings=8192
    )


def broken(*_: object) -> torch.Tensor:
    raise ArithmeticError("planted")


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@contextlib.contextmanager
def process_group(folder: Path) -> Iterator[LocalGroup]:
    """Two attention and two expert ranks that leave no process or socket."""
    pool, batch = {"pool_tokens": 16 * 1024}, {"max_batch_sequences": 2}  # others wait
    config = group_config(2, 2, kv=pool, schedule=batch)
    with LocalGroup(str(folder), config) as group:
        pids = [process.pid for process in group.processes.values()]
        yield group
    assert all(is_gone(pid) for pid in pids)
    names = Path("/proc/net/unix").read_text()
    for ready in group.ready:
        assert not ready.channel_address or ready.channel_address[5:] not in names


def fill(group: LocalGroup, rank: int, client: RankConnection) -> list[int]:
    """Submit generations and long scores, one of each running and waiting, and a BE score."""
    running = client.submit(prompt(1, 20), sampling=greedy(4000))
    client.wait_started(running)
    assert isinstance(client.events[running][0], Tokens)
    long = client.submit(prompt(2, LONG_TOKENS), candidates=[5])
    waiting = client.submit(prompt(3, 30), sampling=greedy(10))
    scoring = client.submit(prompt(4, 50), score_from=10)
    name = f"attention-{rank}"
    until(lambda: (group.rank_status(name).running, group.rank_status(name).waiting) == (2, 2))
    parked = client.submit(prompt(6, LONG_TOKENS), candidates=[5], priority=Priority.BE)
    until(lambda: group.rank_status(name).running > 2)
    return [running, long, waiting, scoring, parked]


def read_to_the_end(client: RankConnection) -> None:
    """Wait until the rank has closed the connection."""
    end_s = time.monotonic() + DEADLINE_S
    with contextlib.suppress(EOFError, ConnectionError):
        while time.monotonic() < end_s:
            client.read()
        pytest.fail("the connection is still open")


# --- an expert rank is lost


def start_streams(
    clients: Iterable[RankConnection], max_tokens: int
) -> list[tuple[RankConnection, int]]:
    """Start a generation on each rank and wait for its first tokens."""
    running = [
        (client, client.submit(prompt(1, 60), sampling=greedy(max_tokens))) for client in clients
    ]
    for client, request in running:
        client.wait_started(request)
    return running


def test_requests_fail_if_lost_expert_rank_is_not_replaced(deep: Path) -> None:
    config = group_config(2, 1, groups={"recovery_timeout_s": 0.5})
    with ThreadGroup(deep, config) as group, group.client(0) as first, group.client(1) as second:
        running = start_streams((first, second), 4000)
        group.experts[0].stop()
        running += [
            (client, client.submit(prompt(2, 9), candidates=[1])) for client in (first, second)
        ]
        for client, request in running:
            failed = client.failed(request)
            assert (failed.code, failed.status) == ("peer_lost", 503)
            assert "expert-0 is lost" in failed.message
            assert "groups.recovery_timeout_s" in failed.message
        for rank in group.attention:
            status = rank.status()
            assert status.healthy
            assert "expert-0 lost, requests wait" in status.notes["experts"]
            assert status.sections["kv_blocks"]["used"] == 0
        first.read_until(lambda: first.state is not None and first.state.waits)
        group.replace("expert-0")
        first.read_until(lambda: first.state is not None and not first.state.waits)
        expected = LocalModel.load(deep, dtype="float32").greedy(prompt(3, 9), 4)
        again = [(c, c.submit(prompt(3, 9), sampling=greedy(4))) for c in (first, second)]
        assert [client.generated(request)[0] for client, request in again] == [expected] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_unexpected_error_names_expert_rank(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadGroup(deep, group_config(1, 2)) as group, group.client() as client:
        monkeypatch.setattr(experts_of(group.experts[1]), "steps", broken)
        client.scored(client.submit(prompt(1, 40), candidates=[1]))
        assert "expert-1 closed" in group.attention[0].status().notes["experts"]
        status = group.experts[1].status()
        assert not status.healthy
        assert "ArithmeticError: planted" in status.reason


def test_hung_expert_rank_is_named_while_its_threads_run(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = group_config(1, 2, channel={"step_timeout_s": 2.0, "heartbeat_timeout_s": 1.5})
    with ThreadGroup(deep, config) as group, group.client() as client:
        half, released = experts_of(group.experts[1]), threading.Event()

        def hang(*arguments: Any) -> Steps[torch.Tensor]:
            released.wait(DEADLINE_S)
            return ExpertHalf.steps(half, *arguments)

        monkeypatch.setattr(half, "steps", hang)
        try:
            client.scored(client.submit(prompt(1, 40), candidates=[1]))
            notes = group.attention[0].status().notes["experts"]
            assert "expert-1 has been silent" in notes
            status = group.experts[1].status()
            assert not status.healthy
            assert "expert-1 has been stuck in one step" in status.reason
        finally:
            released.set()


# --- an attention rank is lost


def test_killed_attention_rank_does_not_affect_the_other(deep: Path) -> None:
    prompts = [prompt(seed, 30 + seed) for seed in range(3)]
    local = LocalModel.load(deep, dtype="float32")
    expected = [local.greedy(prompt, 24) for prompt in prompts]
    with process_group(deep) as group:
        doomed, other = connections(group.client_addresses, group.token)
        fill(group, 0, doomed)
        requests = [other.submit(prompt, sampling=greedy(24)) for prompt in prompts]
        other.wait_started(requests[0])
        group.processes["attention-0"].send_signal(signal.SIGKILL)
        assert [other.generated(request)[0] for request in requests] == expected
        again = [other.submit(prompt, sampling=greedy(24)) for prompt in prompts]
        assert [other.generated(request)[0] for request in again] == expected
        read_to_the_end(doomed)
        for name in ("attention-1", "expert-0", "expert-1"):
            assert group.rank_status(name).healthy
        doomed.close()
        other.close()


def test_unexpected_error_fails_requests_of_attention_rank(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = group_config(2, 1)
    with ThreadGroup(deep, config) as group, group.client(0) as client, group.client(1) as other:
        monkeypatch.setattr(half_of(group.attention[0]), "steps", broken)
        requests = [
            client.submit(prompt(1, 40), sampling=greedy(4)),
            client.submit(prompt(2, 20), candidates=[1]),
        ]
        for request in requests:
            failed = client.failed(request)
            assert "attention-0 failed: ArithmeticError: planted" in failed.message
        assert not group.attention[0].status().healthy
        late = client.submit(prompt(3, 10), candidates=[1])
        assert "attention-0 failed" in client.failed(late).message
        assert len(other.generated(other.submit(prompt(1, 40), sampling=greedy(4)))[0]) == 4


# --- clients


def test_leaving_client_frees_blocks_without_effect_on_others(deep: Path) -> None:
    prompts = [prompt(seed, 45) for seed in (7, 8)]
    local = LocalModel.load(deep, dtype="float32")
    expected = [local.greedy(prompt, 20) for prompt in prompts]
    with ThreadGroup(deep, group_config(1, 2)) as group, group.client() as stays:
        leaver = group.client()
        requests = [stays.submit(prompt, sampling=greedy(20)) for prompt in prompts]
        leaving = [leaver.submit(prompt, sampling=greedy(5000)) for prompt in prompts]
        leaver.wait_started(leaving[1])
        leaver.close()
        assert [stays.generated(request)[0] for request in requests] == expected
        until(lambda: group.attention[0].status().sections["kv_blocks"]["used"] == 0)
        status = group.attention[0].status()
        assert (status.running, status.waiting, status.sections["kv_blocks"]["used"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("token_ids", {"token_ids": [5, 131], "candidates": [0]}),
        ("token_ids", {"token_ids": [-1, 5], "candidates": [0]}),
        ("candidates", {"token_ids": [5], "candidates": [0, 131]}),
    ],
)
def test_ids_outside_vocabulary_are_rejected(
    tiny_checkpoint: Checkpoints, field: str, fields: dict[str, list[int]]
) -> None:
    with ThreadGroup(tiny_checkpoint(), group_config()) as group, group.client() as client:
        failed = client.failed(client.submit(**fields))
        assert (failed.status, field in failed.message) == (400, True)
        assert client.scored(client.submit([5, 6], candidates=[0])).candidate_logits is not None


def test_duplicate_request_id_is_rejected(deep: Path) -> None:
    config = group_config(1, 1)
    with ThreadGroup(deep, config) as group, group.client() as client, group.client() as other:
        first = client.submit(prompt(1, 400), sampling=greedy(5000))
        client.wait_started(first)
        client._next_id -= 1
        again = client.submit(prompt(2, 400), sampling=greedy(5000))
        assert again == first
        client.read_until(lambda: any(isinstance(one, Failed) for one in client.events[first]))
        (failed,) = [event for event in client.events[first] if isinstance(event, Failed)]
        assert failed.status == 400
        assert "request_id" in failed.message
        expected = LocalModel.load(deep, dtype="float32").greedy(prompt(3, 9), 4)
        assert other.generated(other.submit(prompt(3, 9), sampling=greedy(4)))[0] == expected


def test_garbage_ends_only_its_client(deep: Path) -> None:
    with ThreadGroup(deep, group_config(1, 1)) as group, group.client() as client:
        request = client.submit(prompt(1, 20), sampling=greedy(30))
        mad = group.client()
        mad._socket.sendall((5).to_bytes(4, "little") + b"\xc1\xc1\xc1\xc1\xc1")
        read_to_the_end(mad)
        mad.close()
        assert len(client.generated(request)[0]) == 30


# --- experts that are read


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_failed_reader_ends_expert_rank_with_file_name(
    deep: Path, tmp_path: Path, fault: signal.Signals
) -> None:
    config = cached_config(
        tmp_path, channel={"connect_timeout_s": 1.0}, groups={"recovery_timeout_s": 0.2}
    )
    with ThreadGroup(deep, config) as group, group.client() as client:
        assert len(client.generated(client.submit(prompt(1, 9), sampling=greedy(2)))[0]) == 2
        reader = tier_of(group.experts[0])._process
        reader.send_signal(fault)
        start_s = time.monotonic()
        failed = client.failed(client.submit(prompt(2, 60), sampling=greedy(40)))
        assert time.monotonic() - start_s < 1.0 + LIMIT_S
        assert failed.status == 503
        assert "expert-0" in failed.message
        assert "records-" in group.experts[0].status().reason
        reader.kill()


def test_killed_attention_rank_frees_expert_slots(deep: Path, tmp_path: Path) -> None:
    local = LocalModel.load(deep, dtype="float32")
    with ThreadGroup(deep, cached_config(tmp_path)) as group:
        with group.client(0) as first, group.client(1) as second:
            ids = prompt(3, 30)
            dying = [first.submit(prompt(n, 60), sampling=greedy(400)) for n in range(4)]
            first.wait_started(dying[0])
            living = second.submit(ids, sampling=greedy(12))
            group.attention[0].stop()
            found, _ = second.generated(living)
            assert found == local.greedy(ids, 12)
        cache = cache_of(group.experts[0])
        until(lambda: not cache._requests)
        group.experts[0].stop()
        cache.check()
        assert not cache._hints


def cached_config(store: Path, **sections: Any) -> TandemConfig:
    """Return a configuration with one expert rank that caches few experts."""
    prefill = {"host_store": str(store)}
    return group_config(2, 1, experts={"slots": 5}, prefill=prefill, **sections)


def cache_of(rank: Rank) -> ExpertCache:
    assert isinstance(rank.loop, ExpertLoop)
    experts = rank.loop.server._experts
    assert isinstance(experts, CachedExperts)
    return experts._cache


def tier_of(rank: Rank) -> FileTier:
    tier = cache_of(rank)._tier
    assert isinstance(tier, FileTier)
    return tier


# --- starts that fail


def test_unloadable_weights_are_named_without_leaks(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "model")
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    group = LocalGroup(str(folder), group_config(2, 2))
    with pytest.raises(
        CheckpointError, match=r"^(attention|expert)-[01]: [^\n]*model\.safetensors"
    ):
        group.__enter__()
    assert all(is_gone(process.pid) for process in group.processes.values())


def test_oversized_pool_is_named_without_leaks(deep: Path) -> None:
    config = group_config(1, 1, kv={"pool_tokens": 1 << 40})
    group = LocalGroup(str(deep), config)
    with pytest.raises(ResourceError, match=r"attention-0.*kv\.pool_tokens"):
        group.__enter__()
    assert all(is_gone(process.pid) for process in group.processes.values())


def specs_of(folder: Path, expert_ranks: int, backend: str, **sections: Any) -> list[RankSpec]:
    """Return the specs of an attention rank and `expert_ranks` expert ranks."""
    placements = contiguous_placements(str(folder), expert_ranks=expert_ranks)
    config = group_config(1, expert_ranks, **sections)
    group_spec = GroupSpec(config, str(folder), bytes(32), 1, backend, placements=placements)
    seat = Seat("cpu", "127.0.0.1", 1)
    return make_specs(group_spec, [seat], [seat] * expert_ranks)


@contextlib.contextmanager
def loaded(folder: Path, backend: str) -> Iterator[tuple[dict[str, RankProcess], dict[str, str]]]:
    """Return processes of 1 + 2 loaded ranks, and the expert ranks' addresses."""
    specs = specs_of(folder, 2, backend, channel={"connect_timeout_s": 1.0})
    processes = {spec.name: RankProcess(spec.name) for spec in specs}
    try:
        ready = [processes[spec.name].call("prepare", spec) for spec in specs]
        addresses = {
            answer.name: answer.channel_address
            for answer in (future.result(DEADLINE_S) for future in ready)
            if answer.channel_address
        }
        yield processes, addresses
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGKILL)
            process.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_expert_rank_lost_before_connect_is_named(
    tiny_checkpoint: Checkpoints, backend: str
) -> None:
    with loaded(tiny_checkpoint("qwen3_moe"), backend) as (processes, addresses):
        for fault in (signal.SIGSTOP, signal.SIGKILL):
            processes["expert-1"].send_signal(fault)
            if fault is signal.SIGKILL:
                processes["expert-1"]._process.wait(10.0)
            only = {"expert-1": addresses["expert-1"]}
            start_s = time.monotonic()
            with pytest.raises(ChannelError, match="expert-1"):
                processes["attention-0"].call("connect", only).result(DEADLINE_S)
            assert time.monotonic() - start_s < 1.0 + LIMIT_S  # deadline_s, and some


def test_process_lost_while_loading_is_named(tiny_checkpoint: Checkpoints) -> None:
    specs = specs_of(tiny_checkpoint("qwen3_moe"), 1, "shm")
    processes = [RankProcess(spec.name) for spec in specs]
    processes[1].send_signal(signal.SIGKILL)
    with pytest.raises(LaunchError, match="expert-0: its process"):
        form_group(specs, processes, timeout_s=DEADLINE_S)
    for process in processes:
        process.close()
        assert is_gone(process.pid)
