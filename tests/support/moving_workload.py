"""An expert rank that loads moved experts while it computes, on the model of the CUDA runtime."""

import ctypes
from collections.abc import Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from actors.channels import cuda
from actors.rebalance import expert_loading
from contracts.config import TandemConfig
from tests.support.cuda_model import CudaModel, Host, ModelError, Runtime, model, range_of
from tests.support.gather_workload import REQUIRED_HIDDEN, THREADS, GpuLayout, SmallSpec, code_of
from tests.support.spans import length, union

KEYS = [(0, 1), (0, 2), (1, 0), (1, 3)]  # layer, expert
COMPUTE_US, MARK = 400.0, 7


def moving_code(file: str = "", old: str = "", new: str = "") -> dict[str, ModuleType]:
    """Modules of the loader that run on the model, with `old` of a file replaced."""
    return code_of((cuda, expert_loading), file, old, new)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Do as torch's copy_: pageable memory makes the host wait."""
    stream = model().host.current
    addresses = target.data_ptr(), source.data_ptr()
    Runtime().memcpyAsync(*addresses, target.nbytes, 4, stream.cuda_stream)
    if not (non_blocking and source.data_ptr() in Runtime.blocks):
        stream.synchronize()
    return target


def _pinned(stored: Tensor) -> Tensor:
    memory = Runtime.blocks[Runtime().malloc(stored.nbytes)].fill_(MARK)
    return memory.view(stored.dtype).view(stored.shape)


class MovingWorld:
    """A run. fails: the last expert cannot be read, and the others' memory is used again."""

    def __init__(self, code: dict[str, ModuleType], *, fails: bool = False) -> None:
        self._module, self._fails = code["expert_loading"], fails
        self._loaded: list[Tensor] = []
        self._is_done = False
        self._lock: Any = None

    def run(self, seed: int, **machine: Any) -> CudaModel:
        run = CudaModel(seed, **machine)
        with (
            mock.patch.object(torch.Tensor, "copy_", _copy),
            mock.patch.object(torch.Tensor, "pin_memory", _pinned),
        ):
            run.run({"expert-0": self._compute})
        return run

    def _compute(self, host: Host) -> None:
        self._lock = THREADS.Condition()
        held = [range_of(model().memory.block(1 << 12, host.current))]
        for _ in range(4):
            host.launch("experts", COMPUTE_US, reads=held)
        thread = THREADS.Thread(target=self._load, args=(host,))
        thread.start()
        while not self._done():
            host.launch("experts", COMPUTE_US, reads=held)
            host.pause(COMPUTE_US)
        moved = [range_of(memory) for memory in self._loaded]
        if self._fails:
            host.launch("another owner", COMPUTE_US, writes=moved)
        else:
            ends = partial(_check, self._loaded)
            host.launch("moved experts", COMPUTE_US, reads=moved, ends=ends)
        thread.join()

    def _done(self) -> bool:
        with self._lock:
            return self._is_done

    def _load(self, rank: Host) -> None:
        loader = object.__new__(self._module.ResidentExpertLoader)
        config = TandemConfig()
        loader._layout, loader._loaded = GpuLayout(SmallSpec((0, 1), 4, 32, 32)), ""
        loader._spec, loader._config = (
            SimpleNamespace(model_folder=".", config=config),
            config.placement,
        )
        module: Any = self._module
        module.missing_experts = lambda half, ids_of: KEYS
        module.Checkpoint = lambda folder: SimpleNamespace(release=lambda: None)
        module.fingerprint = lambda folder: ""
        module.load_separately = partial(self._read, rank)
        module.assemble_half = lambda half, ids_of, received: received
        limiter = module.RateLimiter(float("inf"), THREADS.Event(), module.monotonic_s)
        try:
            loader._load({}, None, limiter)
        except OSError:
            assert self._fails
        with self._lock:
            self._is_done = True

    def _read(self, rank: Host, _: Any, spec: Any, layer: int, ids: Any, loader: Any) -> None:
        """Read an expert into memory of the caching allocator, of the compute stream."""
        if self._fails and (layer, ids[0]) == KEYS[-1]:
            raise OSError("the file is gone")
        for shape in ((64, 32), (32, 32)):
            stored = torch.zeros(shape)
            memory = model().memory.block(stored.nbytes, rank.default)
            self._loaded.append(memory)
            loader.copy(stored, memory.view(torch.float32).view(shape))


def _check(loaded: Sequence[Tensor]) -> None:
    for memory in loaded:
        pointer, size = range_of(memory)
        if {*ctypes.string_at(pointer, size)} != {MARK}:
            raise ModelError("corrupt", "a moved expert has other bytes")


def moving_symptom(code: dict[str, ModuleType], seeds: range) -> str:
    """The first failure of the loader on this code, or "" if there is none."""
    for seed in seeds:
        for fails in (False, True):
            try:
                run = MovingWorld(code, fails=fails).run(seed)
            except ModelError as failure:
                return failure.kind
            except Exception as error:  # noqa: BLE001 - what the code itself notices
                return f"error: {type(error).__name__}"
            if not fails and hidden_share(run) < REQUIRED_HIDDEN:
                return "lost overlap"
    return ""


def hidden_share(run: CudaModel) -> float:
    """Share of the copies' time in which the rank computes."""
    busy = [(start, end) for _, start, end in run.hosts["expert-0"].device.busy]
    copies = [(start, end) for _, start, end in run.received]
    return 1.0 - (length(union([*copies, *busy])) - length(union(busy))) / length(union(copies))
