"""A fake prefill worker: a FakeRank with a log for the router."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from actors.ranks.prefill_log import WorkerLog
from cluster.routing.pipeline_backend import PipelineBackend
from cluster.routing.prefill_placer import PrefillPlacer
from cluster.routing.rank_client import RankClient
from cluster.routing.rank_set import FindRanks, RoutingConfig
from contracts.messages import Cancel, Failed, Submit, Tokens, ToRank
from contracts.routing_messages import Prompt, RequestKey, WorkerReport
from planner.routing.backlog import Locality
from planner.routing.open_requests import token_work
from planner.routing.worker_state import SaturationConfig
from tests.support.api_harness import ME, QUICK
from tests.support.fake_rank import FakeRank, scored

BLOCK = 4
UNLIMITED = 1_000_000  # tokens

Held = tuple[asyncio.StreamWriter, Submit]


class FakePrefill(FakeRank):
    """A fake worker.

    hold: accept requests without answering until `release`.
    refuse: answer with this failure.
    one_token: send one token of a generation.
    """

    def __init__(self, rank: int, *, epoch: int = 1) -> None:
        super().__init__(f"prefill-{rank}", lambda _: [1, 2, 3])
        self.rank, self.epoch = rank, epoch
        self.hold = False
        self.one_token = False
        self.refuse: Failed | None = None
        self.held: list[Held] = []
        self.taken: list[Submit] = []
        self._address: str | None = None
        self.log = WorkerLog(rank, epoch, token_work, BLOCK)

    def lie(self) -> None:
        """Report the end of an unknown request."""
        snapshot = self.log.snapshot()
        ended = (RequestKey(0, 99),)
        self._send_report(
            WorkerReport(
                worker=self.rank, epoch=self.epoch, number=snapshot.number + 1, ended=ended
            )
        )

    async def listen(self) -> str:
        """Return one address, however often it is called."""
        if self._address is None:
            self._address = await super().listen()
        return self._address

    def release(self, count: int | None = None) -> None:
        """Answer held requests, oldest first."""
        count = len(self.held) if count is None else count
        ready, self.held = self.held[:count], self.held[count:]
        for _, submit in ready:
            self._end(submit)
        self._publish()
        for writer, submit in ready:
            if submit.sampling is None:
                self.send(writer, [scored(submit)])
            else:
                for frame in self.generated(submit):
                    self.send(writer, frame)

    def fail_held(self) -> None:
        """Answer held requests with `refuse`, which the log does not contain."""
        assert self.refuse is not None
        why, held = self.refuse, self.held
        self.held = []
        for writer, submit in held:
            self.send(writer, [Failed(submit.request_id, why.code, why.message, why.status)])

    def _greet(self, writer: asyncio.StreamWriter) -> None:
        self.send(writer, [self.log.snapshot()])

    def _take(self, writer: asyncio.StreamWriter, message: ToRank) -> None:
        if isinstance(message, Cancel):
            self.cancels.put(message.request_id)
            for held in [each for each in self.held if each[1].request_id == message.request_id]:
                self.held.remove(held)
                self._end(held[1])
            self._publish()
            return
        self.taken.append(message)
        if self.refuse is not None:
            why = self.refuse
            self.send(writer, [Failed(message.request_id, why.code, why.message, why.status)])
            return
        assert message.key is not None
        hashes = tuple(message.block_hashes(BLOCK))
        self.log.accepted(Prompt(message.key, len(message.token_ids), hashes))
        self._publish()
        self.held.append((writer, message))
        if self.one_token:
            self.send(writer, [Tokens(message.request_id, [7])])
        elif not self.hold:
            self.release()

    def _end(self, submit: Submit) -> None:
        assert submit.key is not None
        self.log.ended(submit.key)

    def _publish(self) -> None:
        report = self.log.report()
        if report is not None:
            self._send_report(report)

    def _send_report(self, report: WorkerReport) -> None:
        for writer in list(self._writers):
            self.send(writer, [report])


class PrefillPipeline(PipelineBackend):
    """A pipeline with access to its router."""

    def __init__(self, backlog: PrefillPlacer) -> None:
        super().__init__(backlog)
        self.load = backlog.router.load
        self.number = backlog.number


@contextlib.asynccontextmanager
async def routing(
    workers: Sequence[FakePrefill],
    *,
    tau: int = UNLIMITED,
    find: FindRanks | None = None,
    coming: Sequence[FakePrefill] = (),
    locality: Locality | None = None,
    **limits: Any,
) -> AsyncIterator[PrefillPipeline]:
    """Route to `workers`. coming: workers that `find` may add later."""
    clients = [RankClient(w.name, await w.listen(), ME, QUICK) for w in workers]
    clients += [RankClient(w.name, "", ME, QUICK) for w in coming]
    saturation = SaturationConfig(fallback_prompts=(1,), pinned=tau)
    config = RoutingConfig(block_tokens=BLOCK, **limits)
    backlog = PrefillPlacer(clients, config, saturation, token_work, find, locality=locality)
    router = PrefillPipeline(backlog)
    router.start()
    try:
        await router.wait_ready()
        yield router
    finally:
        await router.close()
        for worker in workers:
            await worker.close()
