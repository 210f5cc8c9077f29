"""Bugs planted in the code of the GPU channels, and the search for them on the CUDA model."""

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import msgspec

from actors.channels import cuda, ipc, nccl
from tests.support.channel_workload import PIPELINES, Overlap, Workload, World, overlap
from tests.support.cuda_model import ModelError
from tests.support.gather_workload import gather_code, gather_symptom
from tests.support.moving_workload import moving_code, moving_symptom
from tests.support.slots_workload import slots_code, slots_symptom

BUGS = Path(__file__).with_name("device_bugs.json")
REQUIRED_OVERLAP = 0.95  # of the plan's
_PATCHED = ("device_identity", "require_cupy", "create_memfd", "check_memfd", "mmap", "empty_bytes")


class DeviceBug(msgspec.Struct, frozen=True):
    """A text of a file that the bug replaces. code: the workload that shows it."""

    name: str
    kind: str
    file: str
    old: str
    new: str
    code: Literal["channels", "gather", "moves", "slots"] = "channels"


class Case(NamedTuple):
    """A workload and the machine that it runs on."""

    work: Workload
    machine: dict[str, Any] = {}


SMALL = Workload(layers=1, micro_batches=2)
BATTERY = (
    Case(SMALL, {"spin_limit_us": 250.0}),
    Case(Workload(micro_batches=3, empty=0.3, two_classes=True, segment_bytes=8 << 10)),
    Case(Workload(layers=3, micro_batches=3, sync=0.3, two_classes=True)),
    Case(Workload(layers=3, micro_batches=3, empty=0.4), {"one_gpu": True}),
    Case(
        Workload(
            layers=1, expert_ranks=6, attention_us=20.0, expert_us=20.0, payload_bytes=20_000,
            sync=0.1,
        ),
    ),
    Case(
        Workload(
            layers=1, groups=2, attention_ranks=2, expert_ranks=2, attention_us=20.0,
            expert_us=20.0, sync=0.1,
        )
    ),
)  # fmt: skip


@functools.cache
def device_bugs() -> list[DeviceBug]:
    return msgspec.json.decode(BUGS.read_bytes(), type=list[DeviceBug])


def planted(bug: DeviceBug, backend: ModuleType) -> ModuleType:
    """The backend's module with the bug in it or in the module that it shares with others."""
    is_shared = bug.file.endswith("/cuda.py")
    for module in (cuda, backend) if is_shared else (backend,):
        path = Path(str(module.__file__))
        text = path.read_text(encoding="utf-8")
        if bug.file.endswith(f"/{path.name}"):
            assert text.count(bug.old) == 1, bug.name
            text = text.replace(bug.old, bug.new)
        if is_shared:
            text = text.replace("from actors.channels.cuda import", "from planted.cuda import")
        made = ModuleType(f"planted.{path.stem}")
        sys.modules[made.__name__] = made
        exec(compile(text, str(path), "exec"), made.__dict__)
        for each in _PATCHED:
            if hasattr(made, each):
                setattr(made, each, getattr(module, each))
    return made


def backends_of(bug: DeviceBug) -> list[ModuleType]:
    return [
        each
        for each in (nccl, ipc)
        if bug.file.endswith(("/cuda.py", f"/{each.__name__.rpartition('.')[2]}.py"))
    ]


def symptom(module: ModuleType, seeds: range) -> str:
    """The first failure of the battery on this code, or "" if there is none."""
    for seed in seeds:
        for case in BATTERY:
            if case.machine.get("one_gpu") and not module.__name__.endswith("ipc"):
                continue
            try:
                World(case.work, module).run(seed, **case.machine)
            except ModelError as failure:
                return failure.kind
            except Exception as error:  # noqa: BLE001 - what the code itself notices
                return f"error: {type(error).__name__}"
        if seed == seeds[0] and not all(
            is_overlapped(overlap(module, work)) for work in PIPELINES.values()
        ):
            return "lost overlap"
    return ""


def is_overlapped(shares: Overlap) -> bool:
    return shares.model >= REQUIRED_OVERLAP * shares.plan


def found(bug: DeviceBug, seeds: range) -> str:
    """The symptom of a planted bug, or "" if no run shows one."""
    if bug.code == "gather":
        return gather_symptom(gather_code(bug.file, bug.old, bug.new), seeds)
    if bug.code == "moves":
        return moving_symptom(moving_code(bug.file, bug.old, bug.new), seeds)
    if bug.code == "slots":
        return slots_symptom(slots_code(bug.file, bug.old, bug.new), seeds)
    for backend in backends_of(bug):
        if result := symptom(planted(bug, backend), seeds):
            return result
    return ""
