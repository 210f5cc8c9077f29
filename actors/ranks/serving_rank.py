"""Common parts of attention ranks and prefill workers."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
from llguidance import LLTokenizer

from actors.batching.observer import AdmissionLimits, BatchTraces, RankAdmission
from actors.channels.cuda import DEVICE_ENVIRONMENT
from actors.channels.factory import spin_seconds
from actors.kv.block_manager import BlockManager, StateSlots
from actors.ranks.activation_pass import activation_bytes, batch_limit
from actors.ranks.rank import Rank, RankHooks, Recording
from actors.ranks.serving_loop import ServingLoop, ServingParts
from actors.rpc.client_server import ClientServer
from actors.telemetry.telemetry import RankMetrics
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.config import KvConfig, PriorityConfig, ScheduleConfig, TandemConfig
from contracts.device_modes import check_device
from contracts.errors import CheckpointError, ResourceError
from contracts.logs import event
from contracts.machine import available_bytes, numa_nodes, pinned_cpus, usable_cores
from contracts.ranks import RankReady, RankSpec
from kernels.device import GpuMemory
from kernels.thread_pool import set_spin
from models.decoder.attention import KvPool, kv_bytes_per_token, state_bytes
from models.decoder.decoder import AttentionHalf
from models.spec.model import ModelSpec
from models.text.grammar import grammar_tokenizer
from models.text.tokenizer import Tokenizer
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from models.weights.loading import progress_line
from planner.scheduling.batching import BatchingPolicy
from planner.scheduling.task_order import Preemption, Work
from planner.scheduling.user_policy import UserPolicy, guarded_choice, load_policy, user_batching

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc's limit
_TRIM_INTERVAL_S = 60.0
_COMPILED_PRODUCTS = "256"


def bound_memory() -> None:
    """Set what malloc and oneDNN keep. Call before computing threads start.

    malloc keeps freed memory, because returning a layer's megabytes to the kernel and zeroing them
    again costs more than the arithmetic. Once a minute idle memory is returned (20 ms), so that
    fragmentation and the largest batch do not hold it forever. Without glibc nothing is set.

    oneDNN and torch each cache the latest 1,024 compiled products, 0.4 MB each, and attention over
    contexts of all lengths needs ever new ones: 500 random batches add 1.1 GB. With 256 a process
    stops growing within minutes, but 128 prompts with common prefixes take half as long again.
    Variables that are already set in the environment stay.
    """
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, _COMPILED_PRODUCTS)
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_M_ARENA_MAX, 1)  # other arenas have lower limits
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    _start_trim_thread()


@functools.cache
def _start_trim_thread() -> threading.Thread:
    """Start one thread per process."""
    trim, never = ctypes.CDLL(None).malloc_trim, threading.Event()
    trim.argtypes = [ctypes.c_size_t]

    def work() -> None:
        while not never.wait(_TRIM_INTERVAL_S):
            trim(0)

    thread = threading.Thread(target=work, name="malloc-trim", daemon=True)
    thread.start()
    return thread


def serving_pool(
    half: AttentionHalf,
    config: TandemConfig,
    *,
    ranks_on_node: int,
    kept_bytes: int = 0,
    expert_copies: int = 0,
    memory: GpuMemory | None = None,
) -> KvPool:
    """Return the pool of K and V, and of states.

    kept_bytes: free memory that is reserved. expert_copies: see `activation_bytes`. memory: of a
    GPU; by default that of the half's. Raises ResourceError if memory is lacking.
    """
    model, dtype, device = half.spec, half.dtype, half.device
    memory = memory or GpuMemory.of(device)
    slots = pool_states(model, dtype, config, memory, ranks_on_node=ranks_on_node)
    kept_bytes += slots * state_bytes(model, dtype)
    advice = "raise it or use fewer ranks"
    if memory is not None and config.kv.pool_tokens is None:
        kept_bytes += activation_bytes(half, config, memory, expert_copies)
        advice = f"raise it or lower {batch_limit(expert_copies)}"
    blocks = kv_pool_blocks(
        model, dtype, config, memory,
        ranks_on_node=ranks_on_node, kept_bytes=kept_bytes, advice=advice,
    )  # fmt: skip
    return KvPool(model, blocks, config.kv.block_tokens, dtype, device, num_states=slots)


def block_manager(kv: KvPool, config: KvConfig, **options: bool) -> BlockManager:
    """Return the manager of a pool's blocks and states. options: more of BlockManager's."""
    states = StateSlots(kv.num_states, prefix_cache=config.prefix_cache) if kv.num_states else None
    options = {"prefix_cache": config.prefix_cache, **options}
    return BlockManager(
        kv.num_blocks, share_partial=config.share_partial_blocks, states=states, **options
    )


def kv_pool_blocks(
    model: ModelSpec,
    dtype: torch.dtype,
    config: TandemConfig,
    memory: GpuMemory | None,
    *,
    ranks_on_node: int,
    kept_bytes: int = 0,
    advice: str = "",
) -> int:
    """Return the number of blocks: `kv.pool_tokens`, or what memory allows and batches can use.

    memory: of a GPU. kept_bytes: free memory that is reserved. Raises ResourceError, which ends
    with `advice`, if the pool does not fit.
    """
    block_tokens = config.kv.block_tokens
    block_bytes = kv_bytes_per_token(model, dtype) * block_tokens
    free_bytes = max(0, _free_bytes(memory) - kept_bytes)
    if config.kv.pool_tokens is not None:
        blocks = max(1, -(-config.kv.pool_tokens // block_tokens))
        if blocks * block_bytes > free_bytes:
            raise ResourceError(
                f"kv.pool_tokens={config.kv.pool_tokens} needs {blocks * block_bytes} bytes, "
                f"{free_bytes} are free; lower it"
            )
        return blocks
    fraction = config.kv.fraction(on_gpu=memory is not None)
    usable_bytes = int(free_bytes * fraction / max(1, ranks_on_node))
    useful = -(-model.max_context_tokens // block_tokens) * config.schedule.max_batch_sequences
    blocks = min(usable_bytes // block_bytes, useful)
    if blocks < 1:
        raise ResourceError(
            f"kv.memory_fraction={fraction} leaves {usable_bytes} bytes for the "
            f"KV pool, one block needs {block_bytes}; {advice}"
        )
    return blocks


def pool_states(
    model: ModelSpec,
    dtype: torch.dtype,
    config: TandemConfig,
    memory: GpuMemory | None,
    *,
    ranks_on_node: int,
) -> int:
    """Return the slots of recurrent states: `kv.state_slots`, or what half of the memory allows.

    Raises ResourceError if they do not fit.
    """
    slot_bytes, slots = state_bytes(model, dtype), config.kv.state_slots
    if not slot_bytes:
        return 0
    free_bytes, fraction = _free_bytes(memory), config.kv.fraction(on_gpu=memory is not None)
    usable_bytes = int(free_bytes * fraction / max(1, ranks_on_node)) // 2
    if slots is None:
        slots = min(usable_bytes // slot_bytes, 4 * config.schedule.max_batch_sequences)
    elif slots * slot_bytes > free_bytes:
        raise ResourceError(
            f"kv.state_slots={slots} needs {slots * slot_bytes} bytes, {free_bytes} are free; "
            "lower it"
        )
    if slots < 1:
        raise ResourceError(
            f"kv.memory_fraction={fraction} leaves {usable_bytes} bytes for "
            f"states, a sequence needs {slot_bytes}; raise it or use fewer ranks"
        )
    return slots


def _free_bytes(memory: GpuMemory | None) -> int:
    return available_bytes() if memory is None else memory.free_bytes()


log = logging.getLogger("tandem.worker")
W = TypeVar("W", bound=Work)


class Priorities:
    """Priority settings of one rank. Raises ConfigError for an unusable policy."""

    def __init__(self, config: PriorityConfig, telemetry: RankMetrics, rank: str) -> None:
        self.config = config
        self.user = UserPolicy() if config.policy is None else load_policy(config.policy)
        self._telemetry, self._rank = telemetry, rank
        telemetry.count(metrics.POLICY_FALLBACKS, by=0)
        for objective, seconds in (
            ("ls_ttft", config.ls_ttft_s),
            ("ls_tbt", config.ls_tbt_s),
            ("be_wait", config.be_max_wait_s),
        ):
            telemetry.set(metrics.OBJECTIVE, objective, to=seconds)

    def preemption(
        self,
        order: Callable[[Sequence[W]], W],
        choose: Callable[[Sequence[W]], W | None] | None = None,
    ) -> Preemption[W] | None:
        """Return the task selection, or None without preemption. choose: of a user policy."""
        if not self.config.preempt:
            return None
        telemetry = self._telemetry

        def on_blocked(seconds: float) -> None:
            telemetry.observe(metrics.PREEMPTION_BLOCKING, value=seconds)

        def on_resumed(seconds: float) -> None:
            telemetry.observe(metrics.BE_WAIT, value=seconds)

        choice = Preemption(
            order,
            be_share=self.config.be_share,
            choose=None if choose is None else guarded_choice(choose, self._failed),
            on_blocked=on_blocked,
            on_resumed=on_resumed,
        )
        telemetry.read(metrics.PREEMPTIONS, of=lambda: choice.preempted)
        telemetry.read(metrics.BE_HELD, self._rank, of=lambda: choice.held_s)
        return choice

    def batching(self, default: BatchingPolicy) -> BatchingPolicy:
        """Return the user policy's batching, or the default."""
        form = self.user.form
        return default if form is None else user_batching(form, default, self._failed)

    def _failed(self, reason: str) -> None:
        self._telemetry.count(metrics.POLICY_FALLBACKS)
        event(log, "policy_fallback", logging.WARNING, rank=self._rank, reason=reason)


def set_device_environment() -> None:
    for name, value in DEVICE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


class ServedModel(NamedTuple):
    """Limits that admission needs. tokenizer: of grammars; None if they cannot be used."""

    vocab_size: int
    max_context_tokens: int
    tokenizer: LLTokenizer | None = None


def prepare_process(spec: RankSpec) -> RankSpec:
    """Set up threads, cores, memory and CUDA, before the first product and computing threads.

    Returns the spec with `is_pinned`. Raises ConfigError for a mode that does not run on the rank's
    device.
    """
    check_device(spec.config, spec.device)
    if torch.device(spec.device).type == "cuda":
        set_device_environment()
    torch.set_num_threads(spec.config.groups.torch_threads)
    spec = _pinned(spec)
    set_spin(spin_seconds(spec, usable_cores()))
    bound_memory()
    return spec


def _pinned(spec: RankSpec) -> RankSpec:
    """Pin this thread, and those that it starts, to the rank's cores."""
    number, ranks = spec.core_share
    sets = pinned_cpus(numa_nodes(), ranks, spec.config.groups.torch_threads)
    if not sets:
        return spec
    os.sched_setaffinity(0, sets[number])
    event(log, "rank_pinned", name=spec.name, cpus=sorted(sets[number]))
    return msgspec.structs.replace(spec, is_pinned=True)


def load_half(spec: RankSpec) -> tuple[AttentionHalf, ServedModel]:
    """Load the attention half. Raises CheckpointError."""
    folder, settings = Path(spec.model_folder), spec.config.model
    model = check_checkpoint(folder)
    half = AttentionHalf.load(
        Checkpoint(folder),
        model,
        dtype=resolve_dtype(model, settings.dtype),
        device=torch.device(spec.device),
        progress=progress_line(spec.name, sys.stderr),
    )
    context_tokens = settings.context_tokens(model.max_context_tokens)
    tokenizer = _grammar_tokenizer(folder, model.eos_token_ids)
    return half, ServedModel(model.vocab_size, context_tokens, tokenizer)


def _grammar_tokenizer(folder: Path, eos_token_ids: Sequence[int]) -> LLTokenizer | None:
    """Return the tokenizer of grammars; None if the model has none that can be used."""
    try:
        tokenizer = Tokenizer.load(folder)
        eos = dict.fromkeys((*eos_token_ids, *tokenizer.eos_token_ids))
        known = [token_id for token_id in eos if token_id < tokenizer.vocab_size]
        return grammar_tokenizer(tokenizer.to_json(), known) if known else None
    except (CheckpointError, ValueError):
        return None


def prefill_limits(config: TandemConfig) -> ScheduleConfig:
    """Return the schedule with the batch limits of a prefill worker."""
    return msgspec.structs.replace(
        config.schedule,
        max_batch_tokens=config.prefill.max_batch_tokens,
        max_batch_sequences=config.prefill.max_batch_sequences,
    )


def unusable_checkpoint(spec: RankSpec, half: AttentionHalf) -> CheckpointError:
    """Return the error of a rank whose first pass gave logits that are not finite."""
    return CheckpointError(
        f"{spec.model_folder}: the logits of a first pass are not finite numbers. The "
        f"checkpoint is damaged (fetch it again), or {half.dtype} is too narrow for it "
        "(model.dtype: bfloat16 or float32)"
    )


def serving_rank(
    spec: RankSpec,
    served: ServedModel,
    parts: ServingParts,
    recording: Recording,
    hooks: RankHooks,
    *,
    channel_address: str = "",
) -> Rank:
    config, blocks = spec.config, parts.scheduler.blocks
    limits = AdmissionLimits(
        spec.name,
        served.vocab_size,
        served.max_context_tokens,
        blocks.num_blocks * config.kv.block_tokens,
        config.schedule.max_waiting,
    )
    admission = RankAdmission(limits, parts.scheduler, monotonic_s)
    traces = BatchTraces(spec.name, recording.timeline, monotonic_s)
    parts = parts._replace(observers=[admission, *parts.observers, traces])
    clients = ClientServer(spec.name, token=spec.token, wake=parts.executor.wake, watch=parts.watch)
    recording.metrics.read_each(
        metrics.KV_BLOCKS, lambda: {(spec.name, state): n for state, n in blocks.counts.items()}
    )
    block_tokens, vocabulary = config.kv.block_tokens, served.vocab_size
    loop = ServingLoop(spec.name, clients, parts, block_tokens, served.tokenizer, vocabulary)
    ready = RankReady(
        name=spec.name,
        pid=os.getpid(),
        channel_address=channel_address,
        client_address=clients.listen(spec.host, deadline_s=config.channel.connect_timeout_s),
    )
    return Rank(spec, ready, loop, recording.metrics, recording, hooks)
