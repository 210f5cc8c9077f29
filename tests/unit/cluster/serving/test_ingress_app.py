"""What is deployed, as the wiring makes it of a configuration and a directory."""

from __future__ import annotations

import asyncio

import pytest

from cluster.fleet.codec import Directory
from cluster.serving.ingress_app import pipelines
from contracts.config import TandemConfig
from contracts.errors import RankError
from contracts.messages import Submit
from contracts.requests import Sampling
from tests.support.fake_rank import TOKEN, FakeRank

POISON = Submit(request_id=0, token_ids=[1, 2, 3], sampling=Sampling(max_tokens=4, temperature=0.0))


def test_a_request_that_ends_attention_ranks_ends_three_of_them() -> None:
    """Its own text may be what kills them: it is not tried on every rank there is."""

    async def body() -> None:
        ranks = [FakeRank(f"attention-{rank}", lambda _: []) for rank in range(4)]
        for rank in ranks:
            rank.hold_after, rank.on_submit = 0, rank.drop_connections
        directory = Directory(
            client_addresses={rank.name: await rank.listen() for rank in ranks},
            prefill_addresses={},
            token=TOKEN,
            backend="shm",
            epoch=1,
            ranks=[],
        )
        backend = pipelines(TandemConfig(), directory)
        backend.start()
        try:
            await backend.wait_ready()
            with pytest.raises(RankError, match="attention-") as caught:
                async for _ in backend.generate(POISON):
                    pass
            assert caught.value.code == "peer_dead"
            assert [rank.submits.qsize() for rank in ranks].count(1) == 3
            assert sum(rank.submits.qsize() for rank in ranks) == 3
        finally:
            await backend.close()
            for rank in ranks:
                await rank.close()

    asyncio.run(asyncio.wait_for(body(), 20))
