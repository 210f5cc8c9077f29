"""The planner as a process: requests continue when it is killed or stopped."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.clock import monotonic_s
from contracts.errors import CheckpointError, LaunchError, TandemError
from contracts.ranks import Group, RankStatus
from tests.support.group_harness import DEADLINE_S, RankConnection, greedy, group_config
from tests.support.local_group import LocalGroup
from tests.support.rank_process import RankProcess
from tests.support.simulated_group import hardware
from tests.support.tiny_models import Checkpoints, prompt

pytestmark = pytest.mark.usefixtures("ranks_are_forked")


class Traffic:
    """Repeats the same prompts, whose answers must not change."""

    def __init__(self, group: LocalGroup, client: RankConnection) -> None:
        self.group = group
        self.client = client
        self.expected = self._answers()

    def goes_on_until(self, condition: Callable[[RankStatus], bool]) -> RankStatus:
        end_s = monotonic_s() + DEADLINE_S
        while True:
            assert self._answers() == self.expected
            status = self.group.status()[0]
            assert status.healthy
            if condition(status):
                return status
            assert monotonic_s() < end_s, status

    def _answers(self) -> list[list[int]]:
        requests = [
            self.client.submit(prompt(seed, 10 + 20 * seed), sampling=greedy(6))
            for seed in range(4)
        ]
        return [self.client.generated(request)[0] for request in requests]


@pytest.mark.parametrize(("fault", "state"), [(signal.SIGKILL, "lost"), (signal.SIGSTOP, "slow")])
def test_requests_continue_through_planner_loss(
    tiny_checkpoint: Checkpoints, fault: signal.Signals, state: str
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    config = group_config(
        planner={"report_interval_s": 0.0, "answer_timeout_s": 0.2},
        channel={"heartbeat_timeout_s": 5.0},
    )
    with (
        LocalGroup(str(folder), config, planner=True, hardware=hardware()) as group,
        RankConnection("attention-0", group.client_addresses["attention-0"], group.token) as client,
    ):
        traffic = Traffic(group, client)
        traffic.goes_on_until(lambda status: status.sections["chosen_by"].get("planner", 0) > 0)
        planner = group.processes["planner-0"]
        planner.send_signal(fault)
        try:
            client.submit(prompt(9, 300), sampling=greedy(2))  # of a shape that nobody knows
            traffic.goes_on_until(lambda status: status.notes["planner"] == state)
            if fault is signal.SIGKILL:
                status = traffic.goes_on_until(
                    lambda status: status.sections["chosen_by"].get("default lost", 0) > 3
                )
                before = status.sections["chosen_by"]["planner"]
                start_another_planner(group)
                traffic.goes_on_until(
                    lambda status: status.sections["chosen_by"]["planner"] > before
                )
        finally:
            if fault is signal.SIGSTOP:
                planner.send_signal(signal.SIGCONT)
        if fault is signal.SIGSTOP:
            traffic.goes_on_until(lambda status: status.notes["planner"] == "ready")


def start_another_planner(group: LocalGroup) -> None:
    """Replace the lost planner and notify the ranks."""
    (spec,) = [spec for spec in group._specs if spec.group is Group.PLANNER]
    group.processes[spec.name].close()
    another = group.processes[spec.name] = RankProcess(spec.name)
    ready = another.call("prepare", spec).result(DEADLINE_S)
    another.call("start").result(DEADLINE_S)
    for process in group.processes.values():
        process.call("join_planner", ready.channel_address).result(DEADLINE_S)


def test_group_without_hardware_file_learns_to_plan(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("deepseek_v2")
    config = group_config(planner={"report_interval_s": 0.0}, channel={"heartbeat_timeout_s": 5.0})
    with (
        LocalGroup(str(folder), config, planner=True) as group,
        RankConnection("attention-0", group.client_addresses["attention-0"], group.token) as client,
    ):
        traffic = Traffic(group, client)
        traffic.goes_on_until(lambda status: status.sections["chosen_by"].get("planner", 0) > 0)
        text = group.metrics()["planner-0"]
        assert "tandem_plan_predicted_seconds" in text
        assert "tandem_plan_measured_seconds" in text
        ranks = group.metrics()["attention-0"]
        assert 'chosen_by="planner"' in ranks
        assert [status.name for status in group.status()] == ["attention-0", "expert-0"]


def test_planner_that_cannot_start_fails_the_launch(tmp_path: Path) -> None:
    with (
        pytest.raises(TandemError) as caught,
        LocalGroup(str(tmp_path), group_config(), planner=True),
    ):
        time.sleep(0)
    assert isinstance(caught.value, CheckpointError | LaunchError)
