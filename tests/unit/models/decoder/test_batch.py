"""Positions and slots of an AttentionBatch."""

import pytest
import torch

from models.decoder.batch import AttentionBatch, SequenceSlice


def test_slots_and_positions_follow_block_table() -> None:
    batch = AttentionBatch.build(
        [SequenceSlice([11, 12], 5, [7, 2, 9]), SequenceSlice([13, 14, 15], 0, [4, 5])],
        block_tokens=4,
    )
    assert batch.num_tokens == 5
    assert batch.token_ids_T.tolist() == [11, 12, 13, 14, 15]
    assert batch.positions_T.tolist() == [5, 6, 0, 1, 2]
    assert batch.slots_T.tolist() == [9, 10, 16, 17, 18]
    first, second = batch.sequences
    assert isinstance(first.slots_S, torch.Tensor)
    assert first.slots_S.tolist() == [28, 29, 30, 31, 8, 9, 10]
    assert (first.first, first.count, first.context) == (0, 2, 7)
    assert second.slots_S == slice(16, 19)


def test_consecutive_blocks_become_one_run() -> None:
    batch = AttentionBatch.build([SequenceSlice([1], 9, [3, 4, 5, 8])], block_tokens=4)
    assert batch.sequences[0].slots_S == slice(12, 22)
    batch = AttentionBatch.build([SequenceSlice([1], 0, range(3, 90))], block_tokens=16)
    assert batch.slots_T.tolist() == [48], "the table may exceed the context"
    assert AttentionBatch.build([], block_tokens=4).num_tokens == 0


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [([1], "2 blocks of 4 tokens, the context of 9 tokens needs 3"), ([], "needs tokens")],
)
def test_invalid_slice_raises_error(token_ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionBatch.build([SequenceSlice(token_ids, 8, [0, 1])], block_tokens=4)
