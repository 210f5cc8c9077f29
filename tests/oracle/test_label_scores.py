"""Probabilities of labels of several tokens, against `transformers` label by label."""

import asyncio

import msgspec
import pytest
import torch

from cluster.classification.classify import ClassifyTask, LabelTrie, TokenizedRow, classify_row
from contracts.messages import Scored, Submit
from tests.support.group_harness import PrefillThreads, RankConnection, group_config
from tests.support.tiny_models import Checkpoints
from tests.support.transformers_oracle import Oracle

PROMPT = [(7 * position + 3) % 131 for position in range(21)]
# one begins another one; common first tokens; a chain that only one label goes along; one token
LABELS = [[5, 6], [5, 6, 7], [5, 9, 10, 11, 12], [8], [13, 14], [5, 6, 7, 7]]
GOES_ON = 7  # the paths from which a label goes on: 5, 56, 567, 59, 59.10, 59.10.11, 13


class Direct:
    """A scorer on one worker's socket."""

    def __init__(self, client: RankConnection) -> None:
        self._client = client
        self.num_requests = 0

    async def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Scored:
        self.num_requests += 1
        fields = msgspec.structs.asdict(submit)
        del fields["request_id"]
        return self._client.scored(self._client.submit(fields.pop("token_ids"), **fields))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("disable_kv_cache", [False, True])
def test_labels_with_shared_tokens_match_teacher_forcing(
    tiny_checkpoint: Checkpoints, family: str, disable_kv_cache: bool
) -> None:
    folder = tiny_checkpoint(family)
    oracle = Oracle(folder)
    totals = []
    for label in LABELS:
        logprobs = oracle.logits(PROMPT + label).log_softmax(-1)
        first = len(PROMPT) - 1
        totals.append(sum(float(logprobs[first + i, token]) for i, token in enumerate(label)))
    expected = torch.tensor(totals).softmax(0)
    task = ClassifyTask(labels=tuple(f"label {number}" for number in range(len(LABELS))))
    config = group_config(prefill={"disable_kv_cache": disable_kv_cache})
    with PrefillThreads(folder, config) as group, group.client() as client:
        scorer = Direct(client)
        result = asyncio.run(classify_row(scorer, task, TokenizedRow(PROMPT, LabelTrie(LABELS))))
    torch.testing.assert_close(torch.tensor(result.probs), expected, atol=1e-5, rtol=0)
    assert scorer.num_requests == 5, "chains are one pass: 5 6 7, and 5 9 10 11"
    if not disable_kv_cache:
        computed = result.usage.prompt_tokens - result.usage.cached_tokens
        assert computed == len(PROMPT) + GOES_ON
