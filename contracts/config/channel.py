"""Section `channel`."""

from typing import Annotated, Literal

from msgspec import Meta

from contracts.config.section import Seconds, Section

SPIN_S = 0.005


class ChannelConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transport between ranks, and timeouts after which a peer is considered lost."""

    backend: Literal["auto", "shm", "tcp", "nccl", "ipc"] = "auto"
    """Transport of payloads. "auto": on one node ipc between GPUs (copy engines) or shm, otherwise
    nccl or tcp. Ranks share one GPU if ipc is named explicitly."""
    heartbeat_interval_s: Seconds = 0.2
    """Seconds between two heartbeats of a rank."""
    heartbeat_timeout_s: Seconds = 1.5
    """Seconds without a heartbeat after which a peer is considered lost; at least twice
    heartbeat_interval_s. For peers on the same machine four times as long, or a third as long if
    the process is stopped."""
    step_timeout_s: Seconds = 60.0
    """Seconds that one step of a rank's loop (a layer or less) may take before its heartbeats
    stop."""
    reply_timeout_s: Seconds = 300.0
    """Seconds without an answer to an attention rank after which it considers an expert rank lost,
    even if heartbeats still arrive."""
    connect_timeout_s: Seconds = 10.0
    """Seconds that a connection, a handshake or a blocked send may take."""
    spin_s: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Seconds after a payload during which a waiting rank polls without sleeping, and after a
    product during which its other threads do, since a wake-up takes longer than a short wait. null:
    0.005 if the node has a core for each thread of each rank (groups.torch_threads), otherwise
    0."""
    segment_bytes: Annotated[int, Meta(ge=4096)] = 8 << 20
    """Initial bytes of a link's memory segment with shm and ipc. It is doubled until a payload
    fits."""

    def __post_init__(self) -> None:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s} must be at least twice "
                f"heartbeat_interval_s={self.heartbeat_interval_s}"
            )
