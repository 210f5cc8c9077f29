"""`transformers` in padded batches, as benchmarks run it, says what our decoder says row by row."""

import random

import pytest
import torch

from benchmarks.support.padded import PaddedModel, batches
from tests.support.local_model import LocalModel
from tests.support.tiny_models import Checkpoints

VOCABULARY = 131


@pytest.mark.parametrize("batch_tokens", [1, 60, 1000])
def test_padding_changes_no_row(tiny_checkpoint: Checkpoints, batch_tokens: int) -> None:
    folder, rng = tiny_checkpoint("qwen3_moe"), random.Random(0)
    rows = [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in (5, 31, 2, 17, 30, 5)]
    expected = LocalModel.load(folder, dtype="float32").forward(rows)
    answers = dict(PaddedModel(folder, torch.float32).logits(rows, batch_tokens))
    assert sorted(answers) == list(range(len(rows)))
    for index, found in answers.items():
        torch.testing.assert_close(found, expected[index][-1], atol=1e-4, rtol=0)


def test_batches_are_of_similar_length_and_hold_every_row_once() -> None:
    lengths = [7, 3, 100, 8, 3, 50]
    cut = list(batches(lengths, 24))
    assert cut == [[1, 4, 0], [3], [5], [2]]
