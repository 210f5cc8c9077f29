"""A whole attention/expert group as plain processes of this machine, without Ray."""

from __future__ import annotations

import secrets
from concurrent.futures import wait
from types import TracebackType

from actors.process import RankProcess
from actors.rendezvous import Formation, Seat, form_group, make_specs
from contracts.config import TandemConfig
from contracts.events import TaskSpan
from contracts.worker import Group, RankReady, RankStatus

TOKEN_BYTES = 32
STOP_TIMEOUT_S = 5.0


class LocalGroup:
    """A context manager: the group is up inside, and no process of it is left afterwards.

    `ready`: what each rank told, attention ranks first. `processes`: by rank name.
    """

    def __init__(
        self, model_folder: str, config: TandemConfig, *, backend: str = "shm", device: str = "cpu"
    ) -> None:
        groups = config.groups
        self.token = secrets.token_bytes(TOKEN_BYTES)
        formation = Formation(config, model_folder, self.token, 1, backend)
        attention = [Seat(device, "127.0.0.1", groups.attention_ranks)] * groups.attention_ranks
        expert = [Seat(device, "127.0.0.1", groups.attention_ranks)] * groups.expert_ranks
        self._specs = make_specs(formation, attention, expert)
        self._timeout_s = groups.ready_timeout_s
        self.processes: dict[str, RankProcess] = {}
        self.ready: list[RankReady] = []

    def __enter__(self) -> LocalGroup:
        try:
            for spec in self._specs:
                self.processes[spec.name] = RankProcess(spec.name)
            handles = list(self.processes.values())
            self.ready = form_group(self._specs, handles, timeout_s=self._timeout_s)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def client_addresses(self) -> dict[str, str]:
        """Name -> address of each attention rank, for the ingress's clients."""
        return {
            ready.name: ready.client_address
            for spec, ready in zip(self._specs, self.ready, strict=True)
            if spec.group is Group.ATTENTION
        }

    def status(self, timeout_s: float = 10.0) -> list[RankStatus]:
        futures = [process.call("status") for process in self.processes.values()]
        return [future.result(timeout_s) for future in futures]

    def spans(self, timeout_s: float = 30.0) -> list[TaskSpan]:
        """The recorded spans of all ranks, in order of their start."""
        futures = [process.call("spans") for process in self.processes.values()]
        spans = [span for future in futures for span in future.result(timeout_s)]
        return sorted(spans, key=lambda span: span.start_s)

    def close(self) -> None:
        """Stops all ranks at once, so that none takes the others for lost; then ends them."""
        stopping = [process.call("stop") for process in self.processes.values()]
        wait(stopping, timeout=STOP_TIMEOUT_S)
        for process in self.processes.values():
            process.close()
