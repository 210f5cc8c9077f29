"""All bugs. An area, which begins a bug's name, is in one module."""

from __future__ import annotations

from benchmarks.planted_bugs import (
    batching,
    bulk,
    channels,
    offloading,
    operations,
    placement,
    repair,
    replicas,
    routing,
    scaling,
    sharing,
)
from benchmarks.planted_bugs.bug import Bug

BUGS: tuple[Bug, ...] = (
    *batching.BUGS,
    *bulk.BUGS,
    *channels.BUGS,
    *offloading.BUGS,
    *operations.BUGS,
    *placement.BUGS,
    *repair.BUGS,
    *replicas.BUGS,
    *routing.BUGS,
    *scaling.BUGS,
    *sharing.BUGS,
)
