"""What chaos is done to, as a user has it: `tandem serve` on Ray, with its own supervisor, launcher
and ingress."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

import httpx
import msgspec
import psutil
import yaml

from benchmarks.robustness.links import Links
from benchmarks.robustness.processes import roles_of
from benchmarks.robustness.ray_nodes import RAYLET, SETTINGS, RayNodes
from benchmarks.support.server import ServerProcess
from cluster.http.response_types import Status
from contracts.config import TandemConfig
from contracts.ranks import Group, RankStatus, rank_names

START_S = 300.0
ROLES = {"groups": "launcher-0", "ingress": "ingress-0", "planner": "planner-0"}


class ServedTarget:
    """A context manager: everything serves inside, and no process of it is left afterwards. log: a
    file for what the server writes. nodes: of the Ray cluster that it runs on; None: its own."""

    def __init__(self, config: TandemConfig, log: Path, nodes: RayNodes | None = None) -> None:
        self._config, self._log, self._nodes = config, log, nodes
        self._ended_s = 0.0  # when the ingress was killed last
        self.replaced: list[tuple[str, float]] = []
        self.links: Links | None = None

    def __enter__(self) -> ServedTarget:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
            path = Path(folder) / "chaos.yaml"
            tree = msgspec.to_builtins(self._config)
            if self._nodes is not None:
                stack.enter_context(self._nodes)
                tree["groups"] |= {"address": self._nodes.head.address, **SETTINGS}
            path.write_text(yaml.safe_dump(tree), encoding="utf-8")
            self._server = stack.enter_context(ServerProcess("--config", str(path), log=self._log))
            self._server.wait_healthy(START_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def urls(self) -> list[str]:
        return [self._server.url]

    def ended(self, url: str, since_s: float) -> bool:
        return self._ended_s >= since_s

    def processes(self) -> dict[str, int]:
        return {
            ROLES.get(name, name): process.pid
            for name, process in self._found().items()
            if " " not in name
        }

    @property
    def others(self) -> int:
        """Second ones of a name. (Ray's own come and go.)"""
        return sum(" " in name for name in self._found())

    def _found(self) -> dict[str, psutil.Process]:
        nodes = self._nodes.roots if self._nodes is not None else []
        return roles_of([psutil.Process(self._server.pid), *nodes])

    def kill(self, role: str) -> None:
        if role == RAYLET and self._nodes is not None:
            self._nodes.kill_raylet()
            return
        pid = self.processes().get(role)
        if role.startswith("ingress"):
            self._ended_s = time.monotonic() + 30.0  # until another one listens
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wake(self, role: str) -> str:
        raise NotImplementedError  # Ray's kill of an actor reaches it, stopped or not

    def status(self) -> list[RankStatus]:
        answer = httpx.get(f"{self._server.url}/status", timeout=10.0).raise_for_status()
        return msgspec.json.decode(answer.content, type=Status).ranks

    @property
    def is_whole(self) -> bool:
        """Whether the server says so, and every rank does. (While there is no launcher to ask, the
        server names no rank.)"""
        try:
            ranks = self.status()
            healthy = httpx.get(f"{self._server.url}/health", timeout=5.0).status_code == 200
        except (httpx.HTTPError, msgspec.DecodeError):
            return False
        serving = {rank.name for rank in ranks if rank.healthy and "lost" not in rank.sections}
        return healthy and serving == set(self._names)

    @property
    def _names(self) -> list[str]:
        groups = self._config.groups
        attention = rank_names(Group.ATTENTION, groups.attention_ranks)
        return [*attention, *rank_names(Group.EXPERT, groups.expert_ranks)]
