"""Duration of the layers of a synthetic batch."""

from __future__ import annotations

from collections.abc import Sequence

from actors.engine.executor import ExecutorParts
from actors.moe.backend import TaskKey
from contracts.errors import NotFiniteError
from contracts.plan import Plan
from contracts.requests import Priority
from kernels.device import wait_for_device
from kernels.steps import run_to_end
from models.decoder.batch import AttentionBatch, SequenceSlice

_NUMBER = -1  # not a scheduler's
_POLL_S = 0.1


def time_layers(parts: ExecutorParts, slices: Sequence[SequenceSlice]) -> list[float]:
    """Return the wall seconds of each layer with experts; no batch may be in flight.

    Raises ChannelError, and NotFiniteError if the logits are not finite.
    """
    half, kv, backend, clock = parts.half, parts.kv, parts.backend, parts.clock
    inputs = AttentionBatch.build(list(slices), block_tokens=kv.block_tokens, device=kv.device)
    half.prepare(inputs)
    hidden_TD = half.embed(inputs)
    wait_for_device(half.device)
    times_l = []
    for layer in range(half.spec.num_layers):
        start_s = clock()
        attended = half.attend(layer, hidden_TD, inputs, kv)
        hidden_TD, routed = attended.hidden_TD, attended.routed
        if routed is not None:
            key = TaskKey(_NUMBER, layer, 0, Priority.LS)
            pending = backend.dispatch(key, hidden_TD, routed, Plan())
            shared_TD = half.shared(layer, routed.x_TD)
            while not pending.is_complete:
                backend.poll(_POLL_S, idle=False)
            run_to_end(backend.combine(hidden_TD, pending, shared_TD))
        wait_for_device(half.device)
        if routed is not None:
            times_l.append(clock() - start_s)
    if not half.logits(hidden_TD[-1:]).max().isfinite():
        raise NotFiniteError("the logits of a timing pass are not finite")
    return times_l
