"""The attention/expert group against `transformers` and against our own single-process path."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.ranks.attention_rank import WARM_UP_IDS
from contracts.messages import Cancel
from contracts.plan import Order, Plan
from contracts.traces import Stage
from tests.support.group_harness import ThreadGroup, greedy, group_config, meeting
from tests.support.local_model import LocalModel
from tests.support.tiny_models import VOCABULARY, Checkpoints, prompts
from tests.support.transformers_oracle import Oracle

# Odd configurations of each family: uneven expert counts, head_dim != D/H, tied and untied, a dense
# layer, sliding windows shorter than the prompts, shared experts.
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"num_experts": 5, "tie_word_embeddings": True, "norm_topk_prob": False}),
    ("qwen3_moe", {"num_experts": 11, "mlp_only_layers": [1], "num_key_value_heads": 1}),
    ("mixtral", {}),
    ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16}),
    ("mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    ("deepseek_v2", {"q_lora_rank": 26, "topk_method": "group_limited_greedy",
                     "n_routed_experts": 10, "n_group": 5, "topk_group": 2}),
    ("deepseek_v3", {}),
    ("gpt_oss", {"num_local_experts": 5}),
    ("glm4_moe", {}),
    ("qwen2_moe", {}),
    ("granitemoe", {}),
    ("afmoe", {}),
    ("llama4_text", {}),
    ("qwen3_5_moe_text", {"num_experts": 5}),
]  # fmt: skip
SPLITS = [(1, 1), (1, 2), (2, 3)]
PLANS = [
    Plan(order=Order.NAIVE),
    *(Plan(order=Order.PPPIPE, r1=r1) for r1 in (1, 2, 3)),
    *(
        Plan(order=order, r1=r1, r2=r2)
        for order, r1, r2 in itertools.product((Order.ASAS, Order.AASS), (1, 2, 4), (1, 2, 3))
    ),
    *(Plan(order=Order.ASAS, ma=ma, r1=2, r2=2) for ma in (1, 2, 5)),
]
FEW_PLANS = [
    Plan(order=Order.NAIVE),
    Plan(order=Order.PPPIPE, r1=3),
    Plan(order=Order.ASAS, r1=1, r2=2),
    Plan(order=Order.ASAS, r1=4, r2=3),
    Plan(order=Order.AASS, r1=2, r2=3),
    Plan(order=Order.AASS, r1=4, r2=1),
    Plan(order=Order.ASAS, ma=2, r1=2, r2=2),
]
BEYOND = [
    Plan(r1=3, r2=2, shared_lag=1),
    Plan(r1=4, shared_lag=3),
    Plan(r1=3, r2=2, micro_batch_samples=(1, 4, 2)),
    Plan(r1=3, micro_batch_samples=(1, 1, 1)),  # sizes of another batch: balanced instead
    Plan(r1=4, sequence_chunks=(0.3, 0.55, 0.8, 1.0)),
    Plan(r1=6, r2=3, sequence_chunks=(0.5, 1.0), shared_lag=5),
    Plan(order=Order.AASS, r1=6, r2=2, ma=3, sequence_chunks=(0.5, 1.0)),
]


@pytest.mark.parametrize("number", range(len(CONFIGS)), ids=[family for family, _ in CONFIGS])
def test_logits_equal_transformers_for_splits_of_the_ranks(
    tiny_checkpoint: Checkpoints, number: int
) -> None:
    """The largest split, and one of the others by turns."""
    family, overrides = CONFIGS[number]
    folder = tiny_checkpoint(family, **overrides)
    oracle = Oracle(folder)
    sequences = prompts(1, [23, 1, 40, 7])
    expected = torch.stack([oracle.logits(ids)[-1] for ids in sequences])
    for attention_ranks, expert_ranks in (SPLITS[number % 2], SPLITS[2]):
        config = group_config(attention_ranks, expert_ranks)
        with ThreadGroup(folder, config) as group:
            for rank in range(attention_ranks):
                with group.client(rank) as client:
                    found = client.last_logits(sequences)
                    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "overrides"), CONFIGS)
def test_greedy_tokens_equal_transformers_over_64_decode_steps(
    tiny_checkpoint: Checkpoints, family: str, overrides: dict[str, Any]
) -> None:
    folder = tiny_checkpoint(family, **overrides)
    oracle = Oracle(folder)
    sequences = prompts(2, [5, 19, 33])
    with ThreadGroup(folder, group_config(1, 2)) as group, group.client() as client:
        requests = [client.submit(ids, sampling=greedy(64)) for ids in sequences]
        for request, ids in zip(requests, sequences, strict=True):
            tokens, _ = client.generated(request)
            assert len(tokens) == 64
            assert tokens == oracle.greedy_choices(ids, tokens)


@pytest.mark.parametrize(
    ("family", "max_batch_tokens"),
    [
        *(("qwen3_moe", 48), ("mixtral", 48), ("gpt_oss", 48), ("qwen2_moe", 48)),
        # whole prompts: how chunks behind a prefix attend to latents depends on their lengths
        *((family, 4096) for family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")),
    ],
)
def test_streams_beside_other_load_are_those_of_an_idle_group(
    tiny_checkpoint: Checkpoints, family: str, max_batch_tokens: int
) -> None:
    """In bfloat16, where one changed bit soon changes a token."""
    folder = tiny_checkpoint(family)
    streams = prompts(5, [3 + 7 * n % 61 for n in range(12)])
    config = group_config(
        1,
        2,
        model={"dtype": "bfloat16"},
        schedule={"max_batch_tokens": max_batch_tokens},
        kv={"prefix_cache": False},
    )
    with ThreadGroup(folder, config) as group, group.client() as client:
        idle = [client.generated(client.submit(ids, sampling=greedy(24)))[0] for ids in streams]
        others = prompts(6, [1 + 11 * n % 71 for n in range(24)])
        for ids in others[:12]:
            client.submit(ids, sampling=greedy(9))
        requests = []
        for ids, other in zip(streams, others[12:], strict=True):
            requests.append(client.submit(ids, sampling=greedy(24)))
            client.submit(other, candidates=[1, 2])
        found = [client.generated(request)[0] for request in requests]
    assert found == idle


# Every plan with shared experts (S tasks of their own under ASAS and AASS), then a few of each kind
# for the other families and the other channel.
PLANS_BY_FAMILY_AND_CHANNEL = [
    ("deepseek_v3", "shm", PLANS),
    ("qwen3_moe", "tcp", FEW_PLANS),
    ("mixtral", "shm", FEW_PLANS),
    ("gpt_oss", "tcp", FEW_PLANS),
    ("afmoe", "shm", FEW_PLANS),
    ("llama4_text", "tcp", FEW_PLANS),
    ("qwen3_next", "shm", [*FEW_PLANS[:4], *BEYOND]),
]


@pytest.mark.parametrize(("family", "backend", "plans"), PLANS_BY_FAMILY_AND_CHANNEL)
def test_every_plan_gives_the_logits_of_the_single_process_path(
    tiny_checkpoint: Checkpoints, family: str, backend: str, plans: list[Plan]
) -> None:
    """Ragged batches, prefix hits and in-batch sharing, on 2 attention and 3 expert ranks."""
    folder = tiny_checkpoint(family)
    local = LocalModel.load(folder, dtype="float32")
    head = prompts(3, [35])[0]
    with ThreadGroup(folder, group_config(2, 3), backend=backend) as group:
        clients = [group.client(rank) for rank in range(2)]
        for number, plan in enumerate(plans):
            group.pin(plan)
            # a prefix of this round only: shared inside the batch, then hit in the cache
            shared = prompts(100 + number, [20])[0]
            tails = prompts(200 + number, [1, 9, 30, 2, 17])
            sequences = [*(shared + tail for tail in tails), head, tails[2]]
            expected = local.last_logits(sequences)
            client = clients[number % 2]
            for _ in range(2):
                ids = [client.submit(seq, candidates=VOCABULARY) for seq in sequences]
                answers = [client.scored(request) for request in ids]
                found = torch.tensor([answer.candidate_logits for answer in answers])
                # 1.2e-5 for one prompt of deepseek_v3 on one processor, 5e-6 for all others
                torch.testing.assert_close(found, expected, atol=2e-5, rtol=0, msg=f"{plan}")
            assert all(answer.usage.cached_tokens >= 16 for answer in answers[:5])
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    ("family", "sharing"),
    [("qwen3_moe", True), ("mixtral", False), ("gpt_oss", False), ("deepseek_v2", False),
     ("deepseek_v2", True)],
)  # fmt: skip
def test_plans_beyond_the_paper_give_the_same_logits(
    tiny_checkpoint: Checkpoints, family: str, sharing: bool
) -> None:
    """Late shared experts, uneven sizes and pieces of sequences, with and without shared blocks."""
    folder = tiny_checkpoint(family)
    local = LocalModel.load(folder, dtype="float32")
    with ThreadGroup(folder, group_config(1, 3)) as group, group.client() as client:
        for number, plan in enumerate(BEYOND):
            group.pin(plan)
            head = prompts(500 + number, [20])[0] if sharing else []
            sequences = [head + tail for tail in prompts(number, [61, 3, 40, 17, 1, 90, 34])]
            expected = local.last_logits(sequences)
            found = client.last_logits(sequences)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0, msg=f"{plan}")
            ids = [client.submit(seq, sampling=greedy(3)) for seq in sequences]
            tokens = [client.generated(request)[0] for request in ids]
            assert [row[0] for row in tokens] == expected.argmax(-1).tolist(), plan


def test_shared_experts_of_every_layer_are_tasks_of_the_attention_rank(
    tiny_checkpoint: Checkpoints,
) -> None:
    """Shared experts run after a micro-batch's attention, after the layer's, or as part of it."""
    folder = tiny_checkpoint("deepseek_v2", first_k_dense_replace=0)
    for order in (Order.ASAS, Order.AASS, Order.PPPIPE):
        with ThreadGroup(folder, group_config(1, 1)) as group, group.client() as client:
            group.pin(Plan(order=order, r1=2))
            with meeting(group.attention[0], 2):
                ids = [client.submit(seq, sampling=greedy(4)) for seq in prompts(12, [9, 9])]
            client.wait(*ids)
            spans = [span for span in group.attention[0].trace(0.0).spans if span.layer == 0]
        batch = max(span.batch for span in spans if span.micro_batch == 1)
        stages = [span.stage for span in spans if span.batch == batch]
        tasks = [stage for stage in stages if stage in (Stage.ATTENTION, Stage.SHARED)]
        A, S = Stage.ATTENTION, Stage.SHARED
        expected = {Order.ASAS: [A, S, A, S], Order.AASS: [A, A, S, S], Order.PPPIPE: [A, A]}
        assert tasks == expected[order], order


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss"])
def test_sequences_of_one_batch_share_every_token_that_is_computed_in_it(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    """Whole blocks are shared and parts of blocks copied, also by a later batch."""
    folder = tiny_checkpoint(family)
    local = LocalModel.load(folder, dtype="float32")
    shared, more = prompts(4, [41, 4])
    sequences = [shared + tail for tail in prompts(5, [3, 25, 4])]
    sequences += [shared + more + tail for tail in prompts(11, [30, 1, 17])]
    sequences += [sequences[1], sequences[3][:43]]
    expected = local.last_logits(sequences)
    for plan in (Plan(r1=1), Plan(r1=4, r2=2), Plan(ma=1)):
        with ThreadGroup(folder, group_config(1, 2)) as group, group.client() as client:
            group.pin(plan)
            with meeting(group.attention[0], len(sequences)):
                ids = [client.submit(seq, candidates=VOCABULARY) for seq in sequences]
            answers = [client.scored(request) for request in ids]
            answers += [client.scored(client.submit(seq, candidates=VOCABULARY))
                        for seq in sequences]  # fmt: skip
            found = torch.tensor([answer.candidate_logits for answer in answers])
            torch.testing.assert_close(found, expected.repeat(2, 1), atol=1e-5, rtol=0)
            cached = [answer.usage.cached_tokens for answer in answers]
            assert cached == cached_tokens([list(WARM_UP_IDS)], sequences * 2)


def cached_tokens(earlier: list[list[int]], sequences: list[list[int]]) -> list[int]:
    """Return the common prefix of each sequence with an earlier one, without its last token."""
    found = []
    for number, sequence in enumerate(sequences):
        before = [*earlier, *sequences[:number]]
        found.append(max(
            length for length in range(len(sequence))
            if any(sequence[:length] == other[:length] for other in before)
        ))  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("mixtral", {"sliding_window": 9}), ("deepseek_v2", {}), ("deepseek_v3", {}), ("gpt_oss", {})],
)
def test_chunked_prefill_and_decode_in_one_batch_leave_answers_unchanged(
    tiny_checkpoint: Checkpoints, family: str, overrides: dict[str, Any]
) -> None:
    folder = tiny_checkpoint(family, **overrides)
    local = LocalModel.load(folder, dtype="float32")
    sequences = prompts(7, [150, 31, 64, 9])
    config = group_config(1, 2, schedule={"max_batch_tokens": 40, "r1": 2, "r2": 2})
    with ThreadGroup(folder, config) as group, group.client() as client:
        requests = [client.submit(ids, sampling=greedy(12)) for ids in sequences]
        for request, ids in zip(requests, sequences, strict=True):
            assert client.generated(request)[0] == local.greedy(ids, 12)


def test_a_full_pool_makes_sequences_wait_and_start_again_with_the_same_answers(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    local = LocalModel.load(folder, dtype="float32")
    sequences = prompts(8, [40, 44, 50, 37, 60])
    config = group_config(1, 1, kv={"pool_tokens": 16 * 9})
    with ThreadGroup(folder, config) as group, group.client() as client:
        requests = [client.submit(ids, sampling=greedy(40)) for ids in sequences]
        for request, ids in zip(requests, sequences, strict=True):
            assert client.generated(request)[0] == local.greedy(ids, 40)
        worker = group.attention[0]
        assert worker.status().sections["totals"]["requeued"] > 0


def test_log_probabilities_of_prompt_tokens_equal_the_single_process_path(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    local = LocalModel.load(folder, dtype="float32")
    shared = prompts(9, [37])[0]
    sequences = [shared + tail for tail in prompts(10, [4, 2, 7])]
    with ThreadGroup(folder, group_config(1, 2)) as group, group.client() as client:
        ids = [client.submit(seq, score_from=len(shared)) for seq in sequences]
        for request, seq in zip(ids, sequences, strict=True):
            logprobs = local.forward([seq])[0].log_softmax(-1)
            expected = [float(logprobs[p - 1, seq[p]]) for p in range(len(shared), len(seq))]
            found = client.scored(request).token_logprobs
            assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("number", "family"),
    [
        (0, "qwen3_moe"),
        (3, "deepseek_v3"),
        (4, "gpt_oss"),
        *(
            pytest.param(number, family, marks=pytest.mark.slow)
            for number, family in ((1, "mixtral"), (2, "deepseek_v2"), (5, "llama4_text"))
        ),
    ],
)
def test_expert_ranks_that_keep_few_experts_give_the_bits_of_those_that_keep_all(
    tiny_checkpoint: Checkpoints, tmp_path: Path, number: int, family: str
) -> None:
    """Under several plans, with shared prefixes, on two attention ranks at once."""
    folder, backend = tiny_checkpoint(family), ("shm", "tcp")[number % 2]
    head = prompts(3, [20])[0]
    sequences = [head + tail for tail in prompts(4, [3, 1, 40, 6])]
    found, few = [], [{"slots": 3}, {"slots": 5, "predictor": "none"}, {"slots": 9}]
    for experts in ({}, *(each for n, each in enumerate(few) if n != number % 3)):
        config = group_config(2, 2, experts=experts, prefill={"host_store": str(tmp_path)})
        with ThreadGroup(folder, config, backend=backend) as group:
            clients = [group.client(rank) for rank in range(2)]
            answers: list[Any] = []
            for plan in (Plan(order=Order.NAIVE), Plan(r1=2, r2=2), Plan(r1=3, order=Order.AASS)):
                group.pin(plan)
                ids = [(c, c.submit(s, candidates=VOCABULARY)) for s in sequences for c in clients]
                for client, _ in ids[:2]:
                    client.send(Cancel(client.submit(sequences[0], sampling=greedy(9))))
                answers += [client.scored(request).candidate_logits for client, request in ids]
                ids = [(c, c.submit(s, sampling=greedy(6))) for s in sequences for c in clients]
                answers += [client.generated(request)[0] for client, request in ids]
            found.append(answers)
            for client in clients:
                client.close()
    for answers in found[1:]:
        for answer, expected in zip(answers, found[0], strict=True):
            assert answer == pytest.approx(expected, abs=1e-5)
