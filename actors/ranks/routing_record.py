"""The routing profile that a serving group writes of what its ranks sampled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from contracts.clock import monotonic_s
from contracts.errors import CheckpointError
from contracts.logs import event
from contracts.worker import WorkerSpec
from models.foresight.profile_file import digest_of
from models.foresight.routing_counter import Counted, RoutingCounter
from models.spec.model import ModelSpec
from models.spec.stored_names import ROUTING
from models.text.tokenizer_files import tokenizer_digest

log = logging.getLogger("tandem.planner")

WRITE_S = 60.0
MOST_WAITING = 64  # reports that have come since the last look

Arrays = tuple[NDArray[Any], NDArray[Any]]


class RoutingRecord:
    """`placement.record`: routing.safetensors in that folder, once a minute and at the end. Does
    nothing where that is null. `add` on one thread; `count`, `close` on another, or after it."""

    def __init__(self, spec: WorkerSpec, model: ModelSpec) -> None:
        """Raises CheckpointError."""
        folder = spec.config.placement.record
        self._path = None if folder is None else Path(folder) / ROUTING
        self._waiting: list[Arrays] = []
        self._written_s, self._written_tokens = monotonic_s(), 0
        self._counter: RoutingCounter | None = None
        if self._path is not None:
            model_folder = Path(spec.model_folder)
            self._counter = RoutingCounter(
                Counted(
                    digest_of(model_folder),
                    tokenizer_digest(model_folder),
                    model.moe_layers,
                    model.num_experts,
                    model.top_k,
                    model.vocab_size,
                )
            )

    def add(self, ids_P2: NDArray[Any], paths_PLK: NDArray[Any]) -> None:
        """Checked arrays, which nobody changes any more."""
        if self._counter is not None and len(self._waiting) < MOST_WAITING:
            self._waiting.append((ids_P2, paths_PLK))

    def count(self) -> None:
        """What has come, and writes if it is time to."""
        waiting, self._waiting = self._waiting, []
        if self._counter is None:
            return
        for ids_P2, paths_PLK in waiting:
            self._counter.add(ids_P2, paths_PLK)
        if monotonic_s() >= self._written_s + WRITE_S:
            self._write(self._counter)

    def close(self) -> None:
        self.count()
        if self._counter is not None:
            self._write(self._counter)

    def _write(self, counter: RoutingCounter) -> None:
        self._written_s = monotonic_s()
        if self._path is None or counter.tokens == self._written_tokens:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            counter.counts().write(self._path)
            self._written_tokens = counter.tokens
        except (CheckpointError, OSError) as error:
            event(log, "routing_not_recorded", logging.ERROR, reason=error)
