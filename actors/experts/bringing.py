"""Brings experts into an expert rank beside its work: a thread, a piece at a time, at a bounded
rate; from a peer that has them, else from the checkpoint.

The token path never waits for it: the loop hears of the end by a message. What is given up in the
middle goes with the thread.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from actors.channels.neighbour import boot_id
from actors.experts.brought import Brought
from actors.experts.rank_experts import AllThere
from actors.weights.expert_exchange import gives_way
from contracts.clock import Clock, monotonic_s
from contracts.config import PlacementConfig
from contracts.errors import ChannelError, CheckpointError, ConfigError, ResourceError, TandemError
from contracts.logs import event
from contracts.machine import available_bytes
from contracts.placement import Placement
from contracts.worker import WorkerSpec
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import ExpertLayer, read_apart
from models.experts.host_experts import fingerprint
from models.experts.moe import ExpertHalf
from models.experts.moved import Key, PackedExpert, lacking, with_experts
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint
from models.weights.loading import Loader
from planner.placement.slots import check_fits

log = logging.getLogger("tandem.experts")

_PIECE_BYTES: Final = 1 << 20  # copied or received at once
_BURST_S: Final = 0.01  # of what was not used of the rate
_LET_GO_S: Final = 0.001  # between layers: giving memory back holds others up
_STOP_S: Final = 10.0


class StoppedError(Exception):
    """What is being brought in is not wanted any more."""


class Pace:
    """Keeps to a rate: `took` returns when so many bytes were due. Raises StoppedError."""

    def __init__(self, bytes_per_s: float, stopped: threading.Event, clock: Clock) -> None:
        self._bytes_per_s, self._stopped, self._clock = bytes_per_s, stopped, clock
        self._due_s = clock()
        self.num_bytes = 0

    def took(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        now_s = self._clock()
        self._due_s = max(self._due_s, now_s - _BURST_S) + num_bytes / self._bytes_per_s
        if self._stopped.wait(max(0.0, self._due_s - now_s)):
            raise StoppedError


class PacedLoader(Loader):
    """Copies in pieces, at the pace."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, pace: Pace
    ) -> None:
        super().__init__(checkpoint, dtype, device, None, 0)
        self._pace = pace

    def copy(self, stored: Tensor, out: Tensor) -> None:
        rows = max(1, _PIECE_BYTES * len(out) // max(1, out.nbytes)) if out.ndim else 1
        for first in range(0, len(out), rows):
            piece = out[first : first + rows]
            super().copy(stored[first : first + rows], piece)
            self._pace.took(piece.nbytes)


class Peers(Protocol):
    """Expert ranks that give what they have (actors/weights/expert_giver.py)."""

    def fetch(self, rank: int, key: Key, into: Sequence[Tensor], pace: Pace) -> None:
        """Raises ChannelError where that rank does not give it."""


class CachedBringer:
    """A `Bringer` of ranks that read experts as they are wanted (`SomeThere`): a generation is a
    list of what is theirs."""

    def __init__(self, spec: WorkerSpec, model: ModelSpec, *, asked: bool = False) -> None:
        """asked: attention ranks ask for it, because a rank was lost."""
        self._spec, self._model, self._asked = spec, model, asked
        self._ranks = spec.placement.ranks

    expert_bytes = 0

    def room(self) -> tuple[str, int]:
        """None is needed."""
        return "", 0

    def misfit(self, placement: Placement, *, resizes: bool = False) -> str:
        return misfit(self._spec, self._model, placement, self._ranks, asked=self._asked or resizes)

    def begin(
        self, placement: Placement, done: Callable[[Brought[dict[int, tuple[int, ...]]]], None]
    ) -> None:
        done(Brought(placement.generation, placement.experts_of(self._spec.rank)))

    def stop(self) -> None:
        """Nothing is under way."""

    def settled(self, placement: Placement) -> None:
        self._ranks = placement.ranks

    close = stop


class ResidentBringer:
    """A `Bringer` of ranks that have all of their experts (`AllThere`). asked: attention ranks ask
    for it, because a rank was lost, and wait: as fast as it goes, however much it is."""

    def __init__(
        self,
        spec: WorkerSpec,
        layout: ExpertLayout,
        store: AllThere,
        peers: Peers | None,
        loaded: str,
        clock: Clock = monotonic_s,
        *,
        asked: bool = False,
    ) -> None:
        """loaded: fingerprint of the checkpoint's files when this rank began to read them."""
        self._asked = asked
        self._spec, self._layout, self._store, self._peers = spec, layout, store, peers
        self._loaded = loaded
        self._config: PlacementConfig = spec.config.placement
        self._placement = spec.placement
        self._clock = clock
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        store.let_go = self._let_go

    @property
    def expert_bytes(self) -> int:
        return self._layout.num_bytes(1)

    def room(self) -> tuple[str, int]:
        device = self._layout.device
        if device.type == "cpu":
            return boot_id(), available_bytes()
        return f"{boot_id()} {self._spec.name}", torch.cuda.mem_get_info(device)[0]

    def misfit(self, placement: Placement, *, resizes: bool = False) -> str:
        asked, ranks = self._asked or resizes, self._placement.ranks
        reason = misfit(self._spec, self._layout.spec, placement, ranks, asked=asked)
        return reason or ("" if asked else self._too_much(self._lacking(placement)))

    def begin(self, placement: Placement, done: Callable[[Brought[ExpertHalf]], None]) -> None:
        before, self._stopped = self._thread, threading.Event()
        bringing = _Bringing(self, placement, self._placement, self._stopped)
        name = f"{self._spec.name}-bring"
        run = threading.Thread(target=bringing.run, args=(before, done), name=name, daemon=True)
        self._thread = run
        run.start()

    def stop(self) -> None:
        self._stopped.set()

    def settled(self, placement: Placement) -> None:
        self._placement = placement

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _let_go(self, half: ExpertHalf) -> None:
        """On a thread: thousands of pages go back to the kernel, and the loop should not wait."""
        name = f"{self._spec.name}-let-go"
        threading.Thread(target=_let_go, args=(half.layers(),), name=name, daemon=True).start()

    def _lacking(self, placement: Placement) -> list[Key]:
        ids_of = placement.experts_of(self._spec.rank)
        return lacking(self._store.nearest(ids_of), ids_of)

    def _too_much(self, keys: Sequence[Key]) -> str:
        wanted_bytes = len(keys) * self._layout.num_bytes(1)
        if wanted_bytes <= self._config.move_bytes:
            return ""
        return (
            f"it brings {wanted_bytes} bytes of experts to {self._spec.name}, "
            f"placement.move_bytes={self._config.move_bytes}: move them in several steps"
        )


class _Bringing:
    """One move, on its thread."""

    def __init__(
        self,
        parts: ResidentBringer,
        placement: Placement,
        present: Placement,
        stopped: threading.Event,
    ) -> None:
        self._spec, self._layout = parts._spec, parts._layout
        self._peers, self._clock = parts._peers, parts._clock
        self._half = parts._store.nearest(placement.experts_of(self._spec.rank))
        self._asked = parts._asked
        self._placement, self._present = placement, present
        self._stopped, self._loaded = stopped, parts._loaded
        self._lost: set[int] = set()  # peers that gave nothing
        self._checkpoint: Checkpoint | None = None

    def run(
        self, before: threading.Thread | None, done: Callable[[Brought[ExpertHalf]], None]
    ) -> None:
        start_s, generation = self._clock(), self._placement.generation
        bytes_per_s = math.inf if self._asked else self._spec.config.placement.bytes_per_s
        pace = Pace(bytes_per_s, self._stopped, self._clock)
        half, reason = None, ""
        try:
            if not self._asked:
                gives_way()
            if before is not None:
                before.join(self._spec.config.placement.deadline_s)
            half = self._bring(pace)
        except StoppedError:
            return
        except (TandemError, OSError, RuntimeError, MemoryError, ValueError) as error:
            told = error.message if isinstance(error, TandemError) else str(error)
            reason = f"{self._spec.name} cannot bring its experts in: {told}"
        seconds = self._clock() - start_s
        done(Brought(generation, half, reason, pace.num_bytes, seconds))

    def _bring(self, pace: Pace) -> ExpertHalf:
        ids_of = self._placement.experts_of(self._spec.rank)
        keys = lacking(self._half, ids_of)
        wanted_bytes = len(keys) * self._layout.num_bytes(1)
        if self._layout.device.type == "cpu" and wanted_bytes > available_bytes():
            raise ResourceError(
                f"{wanted_bytes} bytes of experts exceed the {available_bytes()} bytes of free "
                "memory: free some on its node, or lower placement.move_bytes"
            )
        brought = {key: self._one(key, pace) for key in keys}
        if self._checkpoint is not None:
            self._check_same()  # nor was it replaced meanwhile
        return with_experts(self._half, ids_of, brought)

    def _one(self, key: Key, pace: Pace) -> ExpertLayer:
        given = self._from_peer(key, pace)
        if given is not None:
            return given
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(Path(self._spec.model_folder))
            self._check_same()
        loader = PacedLoader(self._checkpoint, self._layout.dtype, self._layout.device, pace)
        layer, expert = key
        read = read_apart(self._checkpoint, self._layout.spec, layer, [expert], loader)
        self._checkpoint.release()
        return read

    def _check_same(self) -> None:
        """Raises CheckpointError where the files are no longer those that this rank loaded: experts
        of two models would be one layer."""
        folder = Path(self._spec.model_folder)
        if fingerprint(folder) != self._loaded:
            raise CheckpointError(
                f"{folder}: the checkpoint was replaced since {self._spec.name} loaded it: put the "
                "files back (as they were, times too), or start the group anew"
            )

    def _from_peer(self, key: Key, pace: Pace) -> ExpertLayer | None:
        """The first that has it and gives it. One that fails is not asked again in this move."""
        if self._peers is None or not self._layout.packed:
            return None
        layer, expert = key
        for rank in range(self._present.ranks):
            low, high = self._present.slot_bounds[rank]
            there = expert in self._present.expert_of_slot[layer][low:high]
            if not there or rank in self._lost or rank == self._spec.rank:
                continue
            into = PackedExpert(self._layout)
            try:
                self._peers.fetch(rank, key, into.memory, pace)
                return into.layer
            except ChannelError as error:
                self._lost.add(rank)
                event(
                    log,
                    "expert_not_given",
                    logging.WARNING,
                    rank=self._spec.name,
                    reason=error.message,
                )
        return None


def _let_go(layers: dict[int, ExpertLayer]) -> None:
    gives_way()
    pause = threading.Event()
    while layers:
        layers.popitem()
        pause.wait(_LET_GO_S)


def misfit(
    spec: WorkerSpec, model: ModelSpec, placement: Placement, ranks: int, *, asked: bool
) -> str:
    """Why a placement is none for this group; empty: it is one. ranks: that there are. asked: by
    attention ranks or the launcher, who may want more or fewer."""
    if spec.config.placement.follow == "off" and not asked:
        return "placement.follow=off: experts stay where they are"
    try:
        number = None if asked else ranks
        check_fits(placement, number, model.num_experts, model.moe_layers)
    except ConfigError as error:
        return error.message
    return ""
