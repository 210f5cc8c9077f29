"""Loading the experts of a placement generation on an expert rank."""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from actors.channels.cuda import new_stream, wait_for_stream
from actors.channels.local_process import boot_id
from actors.moe.rank_experts import ResidentExperts
from contracts.clock import Clock, monotonic_s
from contracts.config import PlacementConfig
from contracts.errors import CheckpointError, ConfigError, ResourceError, TandemError
from contracts.machine import available_bytes
from contracts.placement import Placement
from contracts.ranks import RankSpec
from models.experts.expert_eviction import ExpertKey
from models.experts.expert_half import ExpertHalf, assemble_half, missing_experts
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import ExpertLayer, load_separately
from models.experts.host_experts import fingerprint
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint
from models.weights.loading import Loader
from planner.placement.slots import check_fits


class LoadResult(NamedTuple):
    """Outcome of a load. experts: argument of the store's `place`; None: failed."""

    generation: int
    experts: Any
    reason: str = ""
    loaded_bytes: int = 0
    seconds: float = 0.0


LoadHandler = Callable[[LoadResult], None]


class ExpertLoader:
    """Loads the experts that a generation adds to this rank: none, as a cache loads on demand.

    urgent: for leases of attention ranks after a loss, without limits.
    """

    def __init__(self, spec: RankSpec, model: ModelSpec, *, urgent: bool = False) -> None:
        self._spec, self._model, self._urgent = spec, model, urgent
        self._ranks = spec.placement.ranks

    @property
    def expert_bytes(self) -> int:
        """Bytes of each expert that is loaded."""
        return 0

    def room(self) -> tuple[str, int]:
        """Return the target memory's name and its free bytes. Thread-safe."""
        return "", 0

    def misfit(self, placement: Placement, *, resizes: bool = False) -> str:
        """Return why a placement is impossible, or "". resizes: without a limit of bytes."""
        urgent = self._urgent or resizes
        if self._spec.config.placement.rebalance == "off" and not urgent:
            return "placement.rebalance=off: experts stay where they are"
        try:
            number = None if urgent else self._ranks
            check_fits(placement, number, self._model.num_experts, self._model.moe_layers)
        except ConfigError as error:
            return error.message
        return ""

    def begin(self, placement: Placement, done: LoadHandler) -> None:
        """Start loading. `done` is called once, on any thread, unless stopped before."""
        done(LoadResult(placement.generation, placement.experts_of(self._spec.rank)))

    def stop(self) -> None:
        """Stop loading and drop what has arrived."""

    def on_commit(self, placement: Placement) -> None:
        """Record the placement in use."""
        self._ranks = placement.ranks

    def close(self) -> None: ...


_NICE: Final = 10
_PIECE_BYTES: Final = 1 << 20  # copied at once
_BURST_S: Final = 0.01  # of unused rate that may be caught up
_FREE_PAUSE_S: Final = 0.001  # between layers: unmapping memory delays other threads
_STOP_S: Final = 10.0


class StoppedError(Exception):
    """Loading was stopped."""


class RateLimiter:
    """`acquire` returns when that many bytes are due at the rate. Raises StoppedError."""

    def __init__(self, bytes_per_s: float, stopped: threading.Event, clock: Clock) -> None:
        self._bytes_per_s, self._stopped, self._clock = bytes_per_s, stopped, clock
        self._due_s = clock()
        self.num_bytes = 0

    def acquire(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        now_s = self._clock()
        self._due_s = max(self._due_s, now_s - _BURST_S) + num_bytes / self._bytes_per_s
        if self._stopped.wait(max(0.0, self._due_s - now_s)):
            raise StoppedError


class DeviceCopies:
    """Copies of one thread to a GPU, through pinned memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, new_stream(device)

    def copy(self, stored: Tensor, out: Tensor) -> None:
        """Queue a copy. `out`: allocated on the current stream, whose compute may still use it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            out.copy_(stored.to(out.dtype).pin_memory(), non_blocking=True)

    def finish(self, timeout_s: float) -> None:
        """Wait for all copies. Raises ChannelError."""
        wait_for_stream(self._stream, timeout_s, "copy of experts to the GPU")


class PacedLoader(Loader):
    """Copies in pieces at a limited rate. on_device: to a GPU."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: ExpertLayout,
        limiter: RateLimiter,
        *,
        storage_format: bool | None,
        on_device: DeviceCopies | None = None,
    ) -> None:
        super().__init__(
            checkpoint, layout.dtype, layout.device, None, 0, storage_format=storage_format
        )
        self._limiter, self._on_device = limiter, on_device

    def copy(self, stored: Tensor, out: Tensor) -> None:
        rows = max(1, _PIECE_BYTES * len(out) // max(1, out.nbytes)) if out.ndim else 1
        for first in range(0, len(out), rows):
            piece, part = out[first : first + rows], stored[first : first + rows]
            self._fill(part, piece)
            self.count(piece.nbytes)

    def _fill(self, stored: Tensor, out: Tensor) -> None:
        (super()._fill if self._on_device is None else self._on_device.copy)(stored, out)

    def count(self, num_bytes: int) -> None:
        self._limiter.acquire(num_bytes)


class ResidentExpertLoader(ExpertLoader):
    """An `ExpertLoader` of `ResidentExperts`."""

    def __init__(
        self,
        spec: RankSpec,
        layout: ExpertLayout,
        store: ResidentExperts,
        loaded: str,
        *,
        urgent: bool = False,
    ) -> None:
        """Set up a loader. loaded: fingerprint of the files when this rank began to read them."""
        super().__init__(spec, layout.spec, urgent=urgent)
        self._layout, self._store, self._loaded = layout, store, loaded
        self._config: PlacementConfig = spec.config.placement
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        store.on_free = self._free

    @property
    def expert_bytes(self) -> int:
        return self._layout.num_bytes(1)

    def room(self) -> tuple[str, int]:
        device = self._layout.device
        if device.type == "cpu":
            return boot_id(), available_bytes()
        return f"{boot_id()} {self._spec.name}", torch.cuda.mem_get_info(device)[0]

    def misfit(self, placement: Placement, *, resizes: bool = False) -> str:
        if (reason := super().misfit(placement, resizes=resizes)) or self._urgent or resizes:
            return reason
        ids_of = placement.experts_of(self._spec.rank)
        keys = missing_experts(self._store.nearest(ids_of), ids_of)
        wanted_bytes = len(keys) * self._layout.num_bytes(1)
        most_bytes = self._config.max_move_bytes
        if wanted_bytes <= most_bytes:
            return ""
        return (
            f"it loads {wanted_bytes} bytes of experts on {self._spec.name}, "
            f"placement.max_move_bytes={most_bytes}: move them in several steps"
        )

    def begin(self, placement: Placement, done: LoadHandler) -> None:
        before, self._stopped = self._thread, threading.Event()
        bytes_per_s = math.inf if self._urgent else self._config.bytes_per_s
        limiter = RateLimiter(bytes_per_s, self._stopped, monotonic_s)
        nearest = self._store.nearest(placement.experts_of(self._spec.rank))
        run = partial(self._run, placement, nearest, limiter, before, done)
        name = f"{self._spec.name}-load-experts"
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    # --- on the loading thread

    def _run(
        self,
        placement: Placement,
        nearest: ExpertHalf,
        limiter: RateLimiter,
        before: threading.Thread | None,
        done: LoadHandler,
    ) -> None:
        start_s = monotonic_s()
        half, reason = None, ""
        try:
            if not self._urgent:
                lower_thread_priority()
            if before is not None:
                before.join(self._config.move_timeout_s)
            half = self._load(placement.experts_of(self._spec.rank), nearest, limiter)
        except StoppedError:
            return
        except (TandemError, OSError, RuntimeError, MemoryError, ValueError) as error:
            detail = error.message if isinstance(error, TandemError) else str(error)
            reason = f"{self._spec.name} cannot load its experts: {detail}"
        seconds = monotonic_s() - start_s
        done(LoadResult(placement.generation, half, reason, limiter.num_bytes, seconds))

    def _load(
        self, ids_of: Mapping[int, Sequence[int]], nearest: ExpertHalf, limiter: RateLimiter
    ) -> ExpertHalf:
        """Return a half of these experts, with those of the nearest one."""
        keys, device = missing_experts(nearest, ids_of), self._layout.device
        if not keys:
            return assemble_half(nearest, ids_of, {})
        wanted_bytes = len(keys) * self._layout.num_bytes(1)
        if device.type == "cpu" and wanted_bytes > available_bytes():
            raise ResourceError(
                f"{wanted_bytes} bytes of experts exceed the {available_bytes()} bytes of free "
                "memory: free some on its node, or lower placement.max_move_bytes"
            )
        checkpoint = Checkpoint(Path(self._spec.model_folder))
        self._check_same()
        storage_format = self._spec.config.experts.storage_format
        on_device = DeviceCopies(device) if device.type == "cuda" else None
        loader = PacedLoader(
            checkpoint, self._layout, limiter, storage_format=storage_format, on_device=on_device
        )
        received: dict[ExpertKey, ExpertLayer] = {}
        try:
            for key in keys:
                layer, expert = key
                spec = self._layout.spec
                received[key] = load_separately(checkpoint, spec, layer, [expert], loader)
                checkpoint.release()
        finally:  # memory is freed, or used by the compute
            if on_device is not None:
                on_device.finish(self._config.move_timeout_s)
        self._check_same()  # the files were not replaced meanwhile
        return assemble_half(nearest, ids_of, received)

    def _check_same(self) -> None:
        """Raise CheckpointError if the files have changed: a layer would mix two models."""
        folder = Path(self._spec.model_folder)
        if fingerprint(folder) != self._loaded:
            raise CheckpointError(
                f"{folder}: the checkpoint was replaced since {self._spec.name} loaded it: put the "
                "files back (with their times), or restart the group"
            )

    def _free(self, half: ExpertHalf) -> None:
        """Free on a thread: returning thousands of pages to the kernel would delay the loop."""
        name = f"{self._spec.name}-free-experts"
        threading.Thread(target=_free, args=(half.layers(),), name=name, daemon=True).start()


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread below the loop's."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _free(layers: dict[int, ExpertLayer]) -> None:
    lower_thread_priority()
    pause = threading.Event()
    while layers:
        layers.popitem()
        pause.wait(_FREE_PAUSE_S)
