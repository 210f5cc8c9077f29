"""A last layer that is computed for some rows alone gives those rows what the whole one does."""

import random

import pytest
import torch

from kernels.steps import run_to_end
from models.decoder.batch import AttentionBatch, SequenceSlice
from tests.support.local_model import LocalModel
from tests.support.tiny_models import FAMILIES, UNUSUAL_FAMILIES, Checkpoints

LENGTHS = (21, 1, 9, 40, 3)
COUNTS = (1, 1, 0, 7, 3)  # the last one's are all it has
CACHED = (0, 0, 0, 17, 0)  # tokens of earlier batches


@pytest.mark.parametrize("family", [*FAMILIES, *UNUSUAL_FAMILIES])
def test_the_last_rows_alone_are_those_of_the_whole_layer(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    model, rng = LocalModel.load(tiny_checkpoint(family), dtype="float32"), random.Random(0)
    half, kv = model.attention, model.new_pool(32)
    slices, earlier, first = [], [], 0
    for length, cached in zip(LENGTHS, CACHED, strict=True):
        ids, table = [rng.randrange(3, 131) for _ in range(length)], range(first, first + 4)
        slices.append(SequenceSlice(ids[cached:], cached, table))
        earlier += [SequenceSlice(ids[:cached], 0, table)] if cached else []
        first += 4
    layer = model.spec.num_layers - 1
    for some in (earlier, slices):
        batch = AttentionBatch.build(some, block_tokens=kv.block_tokens)
        hidden_TD = torch.randn(batch.num_tokens, model.spec.hidden_size)
        whole = half.attend(layer, hidden_TD.clone(), batch, kv)
    whole_TD = run_to_end(half.residual(whole.hidden_TD, batch))
    last = batch.last(COUNTS)
    alone = half.attend(layer, hidden_TD, batch, kv, last)
    alone_RD = run_to_end(half.residual(alone.hidden_TD, last.batch))
    torch.testing.assert_close(alone_RD, whole_TD[last.rows_R], atol=1e-5, rtol=0)
    assert alone.routed is not None
    assert whole.routed is not None
    wanted = whole.routed.topk_ids_TK[last.rows_R]
    assert torch.equal(alone.routed.topk_ids_TK, wanted)
    rows = [(seq.first, seq.count, seq.context) for seq in last.batch.sequences]
    assert rows == [(0, 1, 21), (1, 1, 1), (2, 0, 9), (2, 7, 40), (9, 3, 3)]
