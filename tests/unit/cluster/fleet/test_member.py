"""When a rank counts as lost: what is made of its answers and of its silence."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from actors.ranks.remote import RayRank
from cluster.fleet.member import HUNG_AFTER_S, Member, RankBundle
from cluster.fleet.nodes import RankPlacement
from contracts.errors import LaunchError
from contracts.ranks import Group, RankReady, RankSpec, RankStatus


class SilentRank(RayRank):
    """Its status is what the test makes of `answer`."""

    def __init__(self) -> None:
        super().__init__("prefill-0", None)
        self.answer: Future[Any] = Future()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        assert method == "status"
        self.answer = Future()
        return self.answer


def member() -> tuple[Member, SilentRank]:
    rank = SilentRank()
    spec = RankSpec(
        group=Group.PREFILL,
        rank=0,
        attention_ranks=0,
        expert_ranks=0,
        model_folder="",
        token=b"",
        epoch=1,
        device="cpu",
        backend="shm",
    )
    ready = RankReady(name="prefill-0", pid=1, channel_address="")
    return Member(spec, RankBundle(RankPlacement([], None, "cpu", []), 0), rank, ready), rank


def test_answering_worker_is_checked_again_and_kept() -> None:
    worker, rank = member()
    for second in range(20):
        assert worker.check(float(second), 0.0) == ""
        if not rank.answer.done():
            rank.answer.set_result(RankStatus(name="prefill-0", healthy=True))


def test_a_worker_that_does_not_answer_in_time_is_hung() -> None:
    worker, _ = member()
    worker.check(0.0, 0.0)
    assert worker.check(HUNG_AFTER_S - 0.1, 0.0) == ""
    assert "no answer for 3.1 s" in worker.check(HUNG_AFTER_S + 0.1, 0.0)


def test_time_in_which_the_supervisor_itself_stood_still_does_not_count() -> None:
    worker, _ = member()
    worker.check(0.0, 0.0)
    assert worker.check(HUNG_AFTER_S + 10, stalled_s=10.0) == ""
    assert "no answer" in worker.check(HUNG_AFTER_S + 10.5, 0.0)


def test_a_dead_worker_and_one_that_cannot_serve_are_lost_with_the_reason() -> None:
    worker, rank = member()
    worker.check(0.0, 0.0)
    rank.answer.set_exception(LaunchError("prefill-0: its actor died"))
    assert "its actor died" in worker.check(0.1, 0.0)
    worker.check(0.2, 0.0)
    rank.answer.set_result(RankStatus(name="prefill-0", healthy=False, reason="its loop failed"))
    assert worker.check(0.3, 0.0) == "its loop failed"


def test_a_new_worker_in_its_place_does_not_answer_for_the_old_one() -> None:
    worker, rank = member()
    worker.check(0.0, 0.0)
    rank.answer.set_exception(LaunchError("prefill-0: its actor died"))
    worker.replacement_reason = "its actor died"
    worker.assign(worker.spec, SilentRank(), worker.ready)
    assert worker.replacement_reason == ""
    assert worker.check(100.0, 0.0) == ""
