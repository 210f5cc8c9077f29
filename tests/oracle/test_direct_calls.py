"""Direct calls: the answers of packets to the bit, and packets where a call is not completed."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from actors.moe import direct_calls
from actors.moe.direct_calls import CallServer, RemoteLayerDecoder, _expert_table, area_layout
from actors.ranks.rank import Rank
from contracts.messages import Tokens
from contracts.ranks import Group
from kernels.direct_calls import (
    DECLINED,
    DONE,
    PEER_FIELDS,
    RECORD_FIELDS,
    REPLY,
    REQUEST,
    AreaLayout,
    serve_calls,
)
from kernels.experts import RUN_PAIRS
from kernels.thread_pool import shared_pool
from models.decoder.layer_decoder import DecodedLayers, most_rows
from models.experts.expert_half import ExpertHalf
from models.spec.model import read_spec
from models.weights.checkpoint import Checkpoint
from tests.support.group_harness import (
    RankConnection,
    ThreadGroup,
    greedy,
    group_config,
    loop_of,
    meeting,
)
from tests.support.placements import replicated_of
from tests.support.tiny_models import Checkpoints, prompts
from tests.support.waiting import wait_until


def decoder_of(worker: Rank) -> RemoteLayerDecoder:
    decoder = loop_of(worker).executor._layer_decoder
    assert isinstance(decoder, RemoteLayerDecoder)
    return decoder


def calls_of(worker: Rank) -> list[int]:
    """Return the number of direct calls of each expert rank so far."""
    return [int(words[REQUEST // 8]) for words in decoder_of(worker)._words]


def streams(client: RankConnection) -> list[Any]:
    """Return the tokens of three streams, with log-probabilities."""
    sampling = greedy(24, logprobs=2)
    requests = [client.submit(ids, sampling=sampling) for ids in prompts(7, [5, 19, 33])]
    for request in requests:
        client.wait(request)
    events = itertools.chain.from_iterable(client.events[request][:-1] for request in requests)
    return [(event.token_ids, event.logprobs) for event in events if isinstance(event, Tokens)]


FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {  # expert ranks, overrides
    "qwen3_moe": (1, {}),
    "gpt_oss": (2, {}),
    "mixtral": (3, {}),
    "qwen2_moe": (1, {}),
    "olmoe": (2, {"clip_qkv": 0.5}),
    "deepseek_v2": (2, {}),
    "deepseek_v3": (1, {}),
    "exaone_moe": (2, {}),
    "ernie4_5_moe": (3, {}),
    "hunyuan_v1_moe": (1, {}),
    "llama4_text": (2, {}),
    "phimoe": (2, {}),
    "afmoe": (1, {}),
}


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("number", "family"), [*enumerate(FAMILIES)])
def test_answers_and_counters_are_those_of_packets(
    tiny_checkpoint: Checkpoints, number: int, family: str, turn: int
) -> None:
    dtype = ("float32", "bfloat16")[(number + turn) % 2]
    experts, overrides = FAMILIES[family]
    folder = tiny_checkpoint(family, **overrides)
    config = group_config(1, experts, model={"dtype": dtype}, kv={"prefix_cache": False})
    found, counted = [], []
    for is_direct in (True, False):
        with ThreadGroup(folder, config) as group, group.client() as client:
            decoder = decoder_of(group.attention[0])
            if not is_direct:
                decoder._most_rows = 0
            streams(client)
            found.append(streams(client))
            counts = decoder._parts.counts
            counted.append((counts.tokens, counts.copies, counts.pairs_R))
            assert not is_direct or max(calls_of(group.attention[0])) > 50
    assert found[0] == found[1]
    # Requests may share batches differently, which changes copies to several ranks only.
    assert counted[0][0] == counted[1][0]
    assert counted[0][2] == counted[1][2]


@pytest.mark.parametrize(
    ("family", "extra", "overrides"),
    [
        ("qwen3_moe", [2, 3], {"num_experts": 11, "mlp_only_layers": [1]}),
        ("deepseek_v3", [1, 0, 4], {}),
        ("llama4_text", [3, 2], {}),
    ],
)
def test_replicas_are_those_that_packets_choose(
    tiny_checkpoint: Checkpoints, family: str, extra: list[int], overrides: dict[str, Any]
) -> None:
    folder = tiny_checkpoint(family, **overrides)
    placements = {Group.EXPERT: replicated_of(read_spec(folder), extra, 3)}
    config = group_config(1, len(extra), kv={"prefix_cache": False})
    found = []
    for is_direct in (True, False):
        group = ThreadGroup(folder, config, placements=placements)
        with group, group.client() as client:
            worker = group.attention[0]
            decoder = decoder_of(worker)
            if not is_direct:
                decoder._most_rows = 0
            with meeting(worker, 3):
                requests = [
                    client.submit(ids, sampling=greedy(24, logprobs=2))
                    for ids in prompts(7, [5, 19, 33])
                ]
            answers = [client.generated(each) for each in requests]
            counts = decoder._parts.counts
            pairs = [each.pairs_S.tolist() for each in counts._layers.values()]
            found.append((answers, counts.tokens, counts.copies, counts.pairs_R, pairs))
            assert not is_direct or max(calls_of(worker)) > 40
    assert found[0] == found[1]


def test_a_call_that_is_interrupted_ends_with_a_layer(tiny_checkpoint: Checkpoints) -> None:
    layers, run = [], RemoteLayerDecoder.run

    def interrupted(decoder: RemoteLayerDecoder, *given: Any, **options: Any) -> DecodedLayers:
        decoder.interrupt()
        done = run(decoder, *given, **options)
        layers.append(len(done.ends))
        return done

    config = group_config(1, 2, kv={"prefix_cache": False})
    with ThreadGroup(tiny_checkpoint("afmoe"), config) as group, group.client() as client:
        expected = streams(client)
        with patch.object(RemoteLayerDecoder, "run", interrupted):
            assert streams(client) == expected
    assert len(layers) > 50
    assert max(layers) == 1


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "llama4_text", "afmoe"])
def test_a_late_or_declined_call_is_replaced_by_packets(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    config = group_config(1, 2, kv={"prefix_cache": False})
    with ThreadGroup(tiny_checkpoint(family), config) as group, group.client() as client:
        expected, worker = streams(client), group.attention[0]
        assert streams(client) == expected
        before = calls_of(worker)
        with (
            patch.object(CallServer, "has_callers", False),
            patch.object(direct_calls, "GIVE_UP_S", 0.02),
        ):
            assert streams(client) == expected
        made = [now - then for now, then in zip(calls_of(worker), before, strict=True)]
        assert max(made) == 1, "one layer waits, none is called beside it"
        assert streams(client) == expected
        assert sum(calls_of(worker)) > sum(before) + 50
        decoder = decoder_of(worker)

        def change_ranks() -> None:
            wait_until(lambda: decoder.waits, "no call waits", 60.0)
            decoder.use(decoder._topology._replace(missing=()))

        changed = threading.Thread(target=change_ranks)
        with (
            patch.object(CallServer, "has_callers", False),
            patch.object(direct_calls, "GIVE_UP_S", 1e9),
        ):
            changed.start()
            assert streams(client) == expected, "the ranks changed while a call waited"
        for expert in group.experts:
            calls = expert.loop.server._experts.calls  # type: ignore[attr-defined]
            calls._generations[:, 0] += 1
        assert streams(client) == expected


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_attention_ranks_call_at_once(tiny_checkpoint: Checkpoints, family: str) -> None:
    folder = tiny_checkpoint(family)
    config = group_config(2, 2, kv={"prefix_cache": False})
    found = []
    for is_direct in (True, False):
        with (
            ThreadGroup(folder, config) as group,
            group.client(0) as one,
            group.client(1) as other,
            ThreadPoolExecutor(2) as threads,
        ):
            decoders = [decoder_of(worker) for worker in group.attention]
            for decoder in decoders if not is_direct else ():
                decoder._most_rows = 0
            answers = list(threads.map(streams, [one, other]))
            counts = [decoder._parts.counts for decoder in decoders]
            found.append((answers, [(each.tokens, each.pairs_R) for each in counts]))
            for worker in group.attention:
                assert not is_direct or max(calls_of(worker)) > 40
    assert found[0] == found[1]


class CallsOfLayer:
    """Areas of callers with calls of an expert half."""

    def __init__(self, half: ExpertHalf, dtype: torch.dtype, callers: int) -> None:
        spec, self._layout = half.spec, area_layout(half.spec)
        self._half, self._dtype, self._table = half, dtype, _expert_table(half)
        self._callers = callers
        self.words = np.zeros((callers, self._layout.num_bytes // 8), np.int64)
        places = [self._layout.place(words.ctypes.data) for words in self.words]
        self._peers = np.array([(*place, most_rows(spec), RUN_PAIRS) for place in places])
        self._records = np.zeros((callers, RECORD_FIELDS), np.int64)

    def part(self, caller: int, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a part of a caller's area."""
        memory = torch.from_numpy(self.words[caller]).view(torch.uint8)
        return memory[getattr(self._layout, name) :][: count * dtype.itemsize].view(dtype)

    def fill(self, caller: int, layer: int, rows: int) -> None:
        """Write a call of random rows, of two experts each."""
        spec, dtype = self._half.spec, self._dtype
        x = torch.randn(rows * spec.hidden_size).to(dtype)
        experts = torch.stack([torch.randperm(spec.num_experts)[:2] for _ in range(rows)])
        sorted_N = experts.flatten().argsort(stable=True)
        self.part(caller, "x", len(x), dtype).copy_(x)
        self.part(caller, "rows", 2 * rows, torch.int64).copy_(sorted_N // 2)
        self.part(caller, "weights", 2 * rows, torch.float32).copy_(torch.rand(2 * rows))
        counts = experts.flatten().bincount(minlength=spec.num_experts)
        self.part(caller, "counts", spec.num_experts, torch.int64).copy_(counts)
        self.words[caller, 24:28] = 0, layer, rows, 2 * rows

    def serve(self, *callers: int) -> list[tuple[bytes, int, int]]:
        """Return the output of each call, its status, and when it was started."""
        self.words[list(callers), REQUEST // 8] += 1
        tables = np.array([[0, self._table.ctypes.data, len(self._table)]])
        served = serve_calls(
            shared_pool(), self._peers.ctypes.data, self._callers, tables.ctypes.data, 1, 1, -1, 0,
            0, self._records.ctypes.data, self._callers,
        )  # fmt: skip
        assert sorted(self._records[:served, 0].tolist()) == list(callers)
        started = dict(self._records[:served, [0, 7]].tolist())
        found = []
        for caller in callers:
            rows = int(self.words[caller, 26])
            y = self.part(caller, "y", rows * self._half.spec.hidden_size, self._dtype)
            output = bytes(y.view(torch.uint8).tolist())
            found.append((output, int(self.words[caller, 32]), started[caller]))
            y.zero_()
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_waiting_calls_of_a_layer_are_computed_together(
    tiny_checkpoint: Checkpoints, dtype: torch.dtype
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    spec = read_spec(folder)
    half = ExpertHalf.load(Checkpoint(folder), spec, range(spec.num_experts), dtype=dtype)
    calls = CallsOfLayer(half, dtype, 4)
    for caller, (layer, rows) in enumerate([(1, 1), (2, 3), (1, 5), (1, 2)]):
        calls.fill(caller, layer, rows)
    alone = [calls.serve(caller)[0] for caller in range(4)]
    together = calls.serve(0, 1, 2, 3)
    assert [each[:2] for each in together] == [each[:2] for each in alone]
    assert {each[1] for each in alone} == {DONE}
    starts = [each[2] for each in together]
    assert len({starts[0], starts[2], starts[3]}) == 1
    assert starts[1] != starts[0]
    calls.part(2, "rows", 1, torch.int64).fill_(5)  # outside of the call's rows
    assert [each[1] for each in calls.serve(0, 1, 2)] == [DECLINED, DONE, DECLINED]
    calls.words[2, 26] = 0
    assert [each[1] for each in calls.serve(0, 2, 3)] == [DONE, DECLINED, DONE]


@pytest.fixture
def area() -> tuple[np.ndarray[Any, Any], AreaLayout]:
    layout = AreaLayout.of(4, 8, 64, 3)
    return np.zeros(layout.num_bytes // 8, np.int64), layout


GOOD = {"generation": 5, "layer": 0, "rows": 2, "pairs": 4}
BAD = {
    "generation": [4, -1],
    "layer": [-1, 1, 1 << 40],
    "rows": [0, -1, 5, 1 << 62],
    "pairs": [0, -1, 9, 1 << 62],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD.items() for value in values]
)
def test_a_call_outside_of_its_area_or_of_unknown_experts_is_declined(
    area: tuple[np.ndarray[Any, Any], AreaLayout], field: str, value: int
) -> None:
    words, layout = area
    call = {**GOOD, field: value}
    words[24:28] = list(call.values())
    words[REQUEST // 8] = 1
    peer = np.array([*layout.place(words.ctypes.data), 4, 8])
    assert len(peer) == PEER_FIELDS
    experts = np.zeros((1, 16), np.int64)  # without panels: not even a good call is computed
    tables = np.array([[5, experts.ctypes.data, 1]])
    records = np.zeros((2, RECORD_FIELDS), np.int64)
    arguments = [peer.ctypes.data, 1, tables.ctypes.data, 1, 1, -1, 0, 0, records.ctypes.data, 2]
    assert serve_calls(shared_pool(), *arguments) == 1
    assert words[REPLY // 8] == 1
    assert words[32] == DECLINED
    assert serve_calls(shared_pool(), *arguments) == 0
