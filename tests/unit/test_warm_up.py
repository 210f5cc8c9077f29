"""An attention rank's first batch is its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.group_harness import ThreadGroup, group_config

Checkpoints = Callable[..., Path]


@pytest.mark.parametrize(("pool_tokens", "has_own"), [(16 * 512, True), (32, False)])
def test_the_first_batch_is_the_ranks_own_where_the_pool_has_room_for_it(
    tiny_checkpoint: Checkpoints, pool_tokens: int, has_own: bool
) -> None:
    config = group_config(kv={"pool_tokens": pool_tokens})
    with ThreadGroup(tiny_checkpoint("qwen3_moe"), config) as group, group.client() as client:
        client.scored(client.submit([1, 2, 3], candidates=[0]))
        batches = sum(group.attention[0].status().batches.values())
        assert (batches > 1) is has_own  # our request is one batch at most
