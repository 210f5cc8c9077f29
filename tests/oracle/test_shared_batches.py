"""Batches that prefill workers compute together, against a worker that computes alone."""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch

from actors.channels.base import TensorSpec
from actors.channels.endpoint import Endpoint
from actors.gather.group_exchange import GroupExchange
from actors.gather.shared_pass import SharedPass
from actors.gather.shuffled import ShuffledBackend
from actors.moe.backend import WholeBatch
from actors.ranks.prefill_rank import prefill_rank
from actors.ranks.rank import Rank
from actors.ranks.rendezvous import channel_addresses
from contracts.errors import ConfigError
from contracts.ranks import Group
from models.weights.checkpoint import check_checkpoint
from planner.schedule.batch_choice import BatchChoice, ExchangeScheme, moved_rows
from tests.support.group_harness import (
    PrefillThreads,
    RankConnection,
    loop_of,
    meeting,
    prefill_config,
    until,
)
from tests.support.tiny_models import VOCABULARY, Checkpoints, prompts

ROWS = prompts(1, [23, 1, 140, 7])
CHUNKS: dict[str, Any] = {"prefill": {"max_batch_tokens": 48}}
STATES = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_experts": 11, "num_hidden_layers": 5, "mlp_only_layers": [1]}),
    ("mixtral", {"num_local_experts": 5}),  # 2 KV heads on 3 workers are on several
    ("deepseek_v3", {"num_hidden_layers": 4}),
    ("gpt_oss", {"num_local_experts": 5, "num_hidden_layers": 4}),
    ("afmoe", {}),
    ("llama4_text", {}),
    ("olmoe", {}),  # a norm over all heads
    ("deepseek_v32", {}),  # indexers
    ("qwen3_next", STATES),
    ("deepseek_v2", {}),  # from here on, similar to others
    ("qwen2_moe", {}),
    ("minimax_m2", {}),
    ("glm_moe_dsa", {}),
    ("qwen3_5_moe_text", STATES),
]
NUMBERS = [*range(9), *(pytest.param(number, marks=pytest.mark.slow) for number in range(9, 14))]


def logits_of(client: RankConnection, rows: Sequence[Sequence[int]] = ROWS) -> torch.Tensor:
    return torch.cat([client.last_logits([ids]) for ids in rows])


def alone_logits(
    folder: Path, rows: Sequence[Sequence[int]] = ROWS, **sections: Any
) -> torch.Tensor:
    config = prefill_config(**sections)
    with PrefillThreads(folder, config) as group, group.client() as client:
        return logits_of(client, rows)


def led(group: PrefillThreads, rank: int = 0) -> float:
    """Return the shared batches that a worker led to their end."""
    return group.workers[rank].status().sections["shared_batches"]["led"]


def shares(
    client: RankConnection, group: PrefillThreads, row: Sequence[int], expected: torch.Tensor
) -> bool:
    """Compute a prompt on the first worker; return whether its batch was shared."""
    before = led(group)
    torch.testing.assert_close(logits_of(client, [row]), expected, atol=1e-5, rtol=0)
    return led(group) > before


@contextmanager
def sharing(
    folder: Path,
    workers: int,
    backend: str = "shm",
    scheme: ExchangeScheme | None = ExchangeScheme.SHUFFLED,
    **sections: Any,
) -> Iterator[PrefillThreads]:
    """Run workers that share every batch."""
    sections["prefill"] = {"experts": "shuffled", **sections.get("prefill", {})}
    config = prefill_config(**sections)
    with (
        patch.object(BatchChoice, "gain_s", return_value=60.0),
        PrefillThreads(folder, config, workers=workers, backend=backend) as group,
    ):
        for worker in group.workers:
            backend_of(worker)._group = backend_of(worker)._group._replace(scheme=scheme)
        yield group


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: FAMILIES[number][0])
def test_logits_of_shared_batches_equal_those_of_one_worker(
    tiny_checkpoint: Checkpoints, number: int, turn: int
) -> None:
    """A scheme with two workers and the other one with three: by turns."""
    family, overrides = FAMILIES[number]
    folder = tiny_checkpoint(family, **overrides)
    expected = alone_logits(folder)
    schemes = [ExchangeScheme.TENSOR_PARALLEL, ExchangeScheme.SHUFFLED]
    for place, (workers, backend) in enumerate(((2, "shm"), (3, "tcp"))):
        scheme, found = schemes[(number + turn + place + 1) % 2], []
        with sharing(folder, workers, backend, scheme) as group:
            assert set(_exchange(group, 0).levels.nodes) == {0}  # of one host
            for rank in range(workers):
                with group.client(rank) as client:
                    found.append(logits_of(client))
                assert led(group, rank) == len(ROWS)
        for logits in found:
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


PREFIX = prompts(2, [70])[0]
WITH_PREFIX = [PREFIX + tail for tail in prompts(3, [90, 5, 33, 1])]


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "deepseek_v32", "qwen3_next"]
)
def test_prefixes_and_chunks_are_read_across_shared_and_lone_batches(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    folder = tiny_checkpoint(family, **(STATES if family == "qwen3_next" else {}))
    expected = alone_logits(folder, WITH_PREFIX, **CHUNKS)
    for workers in (2, 3):
        with (
            sharing(folder, workers, **CHUNKS) as group,
            patch.object(BatchChoice, "gain_s", side_effect=itertools.cycle([60.0, 0.0, 60.0])),
            group.client() as client,
        ):
            found = logits_of(client, WITH_PREFIX)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            assert led(group) >= 4


@pytest.mark.parametrize("disable_kv_cache", [True, False])
def test_sequences_share_blocks_within_a_shared_batch(
    tiny_checkpoint: Checkpoints, disable_kv_cache: bool
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    expected = alone_logits(folder, WITH_PREFIX)
    prefill = {"disable_kv_cache": disable_kv_cache}
    with sharing(folder, 2, prefill=prefill) as group, group.client() as client:
        with meeting(group.workers[0], len(WITH_PREFIX)):
            ids = [client.submit(row, candidates=VOCABULARY) for row in WITH_PREFIX]
        torch.testing.assert_close(client.logits(ids), expected, atol=1e-5, rtol=0)
        assert led(group) == 1


def at_layer(layer: int, act: Callable[[SharedPass], None]) -> Any:
    """Return a patch that acts before a layer of each worker's side of a shared batch."""
    order = SharedPass._order

    def acting(shared: SharedPass, number: int, *rest: Any) -> Any:
        if number == layer:
            act(shared)
        return order(shared, number, *rest)

    return patch.object(SharedPass, "_order", acting)


def test_batch_that_loses_a_worker_is_computed_alone_and_the_group_forms_again(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    expected = alone_logits(folder)
    with sharing(folder, 3, "tcp") as group, group.client() as client:
        stop = once(lambda: threading.Thread(target=group.workers[2].stop).start())
        with at_layer(1, lambda shared: stop() if shared._exchange.rank == 2 else None):
            torch.testing.assert_close(logits_of(client), expected, atol=1e-5, rtol=0)
        assert led(group) == 0  # no later batch is shared with two of three
        assert group.workers[0].status().sections["shared_batches"]["lost"] == 1
        assert group.workers[0].status().healthy
        with group.client(1) as other:
            torch.testing.assert_close(logits_of(other), expected, atol=1e-5, rtol=0)
        group.workers[2] = replaced(group, 2)
        until(lambda: _exchange(group, 0).is_linked and _exchange(group, 1).is_linked)
        torch.testing.assert_close(logits_of(client), expected, atol=1e-5, rtol=0)
        assert led(group) == len(ROWS)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_error_of_a_follower_ends_its_batch_only(tiny_checkpoint: Checkpoints, family: str) -> None:
    folder = tiny_checkpoint(family)
    expected = alone_logits(folder, **CHUNKS)

    def fail(shared: SharedPass) -> None:
        if shared._exchange.rank == 1:
            passes.append(1)
            if len(passes) == 4:  # the second chunk of a prompt, which continues states
                raise MemoryError("no memory for a test")

    passes: list[int] = []
    with sharing(folder, 2, **CHUNKS) as group, group.client() as client, at_layer(2, fail):
        torch.testing.assert_close(logits_of(client), expected, atol=1e-5, rtol=0)
        assert led(group) == len(ROWS) + 1  # with two more chunks
        assert not _exchange(group, 1)._arrived


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_worker_with_requests_leaves_a_batch_and_the_leader_computes_the_rest(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    folder = tiny_checkpoint(family, **(STATES if family == "qwen3_next" else {}))
    expected, sent = alone_logits(folder, WITH_PREFIX, **CHUNKS), list[int]()
    for workers in (2, 3):
        with (
            sharing(folder, workers, **CHUNKS) as group,
            group.client() as client,
            group.client(1) as other,
        ):

            def submit(shared: SharedPass, group: PrefillThreads, other: RankConnection) -> None:
                if shared._exchange.rank == 0 and not other.events:
                    sent.append(other.submit(WITH_PREFIX[0], candidates=VOCABULARY))
                    until(lambda: not backend_of(group.workers[1]).is_engaged)

            with at_layer(1, functools.partial(submit, group=group, other=other)):
                found = logits_of(client, WITH_PREFIX)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(other.logits(sent), expected[:1], atol=1e-5, rtol=0)
            counts = group.workers[0].status().sections["shared_batches"]
            assert counts["left"] >= 1
            assert counts["lost"] == 0
            sent.clear()
            # Until then the workers may know each other as busy.
            until(functools.partial(shares, client, group, WITH_PREFIX[0], expected[:1]))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next", "afmoe"])
def test_worker_that_becomes_idle_computes_the_rest_of_a_batch(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    layers = {"num_hidden_layers": 4}
    folder = tiny_checkpoint(family, **(STATES if family == "qwen3_next" else layers))
    expected, share = alone_logits(folder, WITH_PREFIX, **CHUNKS), ShuffledBackend.share

    def shared(leader: ShuffledBackend, whole: WholeBatch, layer: int) -> Any:
        if layer < 2:
            return None
        until(leader._may_call)
        return share(leader, whole, layer)

    for workers in (2, 3):
        with (
            sharing(folder, workers, **CHUNKS) as group,
            group.client() as client,
            patch.object(ShuffledBackend, "share", shared),
        ):
            found = logits_of(client, WITH_PREFIX)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            assert led(group) >= len(WITH_PREFIX)


def test_call_that_one_worker_declines_ends_without_a_warning_of_the_others(
    tiny_checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    expected = alone_logits(folder)
    with sharing(folder, 3) as group, group.client() as client:

        def is_linked(exchange: GroupExchange) -> bool:
            if exchange.rank == 2:  # declines after the other one has accepted
                until(lambda: _exchange(group, 1).number > 0)
            return exchange.rank != 2

        with patch.object(GroupExchange, "is_linked", property(is_linked)):
            torch.testing.assert_close(logits_of(client), expected, atol=1e-5, rtol=0)
        wait_for_end([_exchange(group, rank) for rank in range(3)])
        assert led(group) == 0
    assert not [each for each in caplog.messages if "shared_batch" in each]


def test_busy_worker_declines_and_each_computes_alone(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    expected = alone_logits(folder)
    with sharing(folder, 2) as group, group.client(0) as one, group.client(1) as other:
        with meeting(group.workers[0], len(ROWS)), meeting(group.workers[1], len(ROWS)):
            sent = [
                [client.submit(row, candidates=VOCABULARY) for row in ROWS]
                for client in (one, other)
            ]
        for client, ids in zip((one, other), sent, strict=True):
            torch.testing.assert_close(client.logits(ids), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "workers", "reason"),
    [
        ("qwen3_next", 3, "groups.prefill_ranks=3 .* more than the 2 key heads of recurrent"),
        ("qwen3_moe", 7, "groups.prefill_ranks=7 .* more than the 6 attention heads"),
    ],
)
def test_attention_that_cannot_be_divided_is_refused(
    tiny_checkpoint: Checkpoints, family: str, workers: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason), sharing(tiny_checkpoint(family), workers):
        pass


def backend_of(worker: Rank) -> ShuffledBackend:
    backend = loop_of(worker).executor.backend
    assert isinstance(backend, ShuffledBackend)
    return backend


def _exchange(group: PrefillThreads, rank: int) -> GroupExchange:
    return backend_of(group.workers[rank])._exchange


def once(act: Callable[[], None]) -> Callable[[], None]:
    acts = iter([act])
    return lambda: next(acts, lambda: None)()


def replaced(group: PrefillThreads, rank: int) -> Rank:
    """Start another worker in the place of one that has stopped, and introduce it."""
    worker = prefill_rank(msgspec.structs.replace(group.workers[rank].spec, epoch=2))
    others = [each for each in group.workers if each.ready.name != worker.ready.name]
    addresses = channel_addresses([w.ready for w in (*others, worker)], Group.PREFILL)
    for each in (*others, worker):
        each.hooks.connect(addresses)
    worker.start()
    return worker


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Collect the bytes of packets, without messages."""
    sent: list[int] = []
    reserve, send = Endpoint.reserve, GroupExchange.send

    def reserved(endpoint: Endpoint, peer: str, parts: Sequence[TensorSpec]) -> Any:
        sent.append(sum(part.num_bytes for part in parts))
        return reserve(endpoint, peer, parts)

    def sending(exchange: GroupExchange, message: Any, number: int, peers: Any = None) -> None:
        peers = exchange._peers if peers is None else peers
        sent.append(-len(peers) * len(msgspec.msgpack.encode(message)))
        send(exchange, message, number, peers)

    with patch.object(Endpoint, "reserve", reserved), patch.object(GroupExchange, "send", sending):
        yield sent


def wait_for_end(exchanges: Sequence[GroupExchange]) -> None:
    until(lambda: not any(each.number for each in exchanges))


@pytest.mark.parametrize(("family", "workers"), [("qwen3_moe", 2), ("qwen3_moe", 3), ("olmoe", 2)])
def test_bytes_of_each_scheme_are_those_of_the_formula(
    tiny_checkpoint: Checkpoints, family: str, workers: int
) -> None:
    folder = tiny_checkpoint(family)
    expected, spec = alone_logits(folder, ROWS[2:3]), check_checkpoint(folder)
    tokens, layers = len(ROWS[2]), spec.num_layers
    for scheme in (
        None,
        ExchangeScheme.ALL_REDUCE,
        ExchangeScheme.REDUCE_SCATTER,
        ExchangeScheme.SHUFFLED,
        ExchangeScheme.TENSOR_PARALLEL,
    ):
        with (
            counted_bytes() as sent,  # ends after the group, which sends to the end
            sharing(folder, workers, "tcp", scheme, prefill={"disable_kv_cache": True}) as group,
            group.client() as client,
        ):
            logits = logits_of(client, ROWS[2:3])
            exchanges = [_exchange(group, rank) for rank in range(workers)]
            wait_for_end(exchanges)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
        rows = tokens * (layers - 1) + 1  # the last layer has one row
        counted = scheme or ExchangeScheme.REDUCE_SCATTER  # served inside a node
        row_bytes, links = spec.hidden_size * 4, (workers - 1) * workers
        expected_bytes = moved_rows(counted, workers, 0) * rows * row_bytes
        if family == "olmoe":  # sums of squares of queries and keys
            expected_bytes += tokens * layers * links * 8
        if scheme is not ExchangeScheme.TENSOR_PARALLEL:
            pairs = sum(sum(e.counts.pairs_R) - e.counts.pairs_R[e.rank] for e in exchanges)
            expected_bytes += 2 * sum(each.counts.copies for each in exchanges) * row_bytes
            expected_bytes += pairs * 8  # index and weight
            expected_bytes += (workers - 1) * spec.num_experts * layers * 4  # pairs of each slot
        if scheme is ExchangeScheme.SHUFFLED:  # predictions, a byte for each worker
            expected_bytes += tokens * (layers - 1) * links
        assert sum(sent) == expected_bytes
