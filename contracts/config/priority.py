"""Section `priority`."""

from typing import Annotated

from msgspec import Meta

from contracts.config.section import Seconds, Section


class PriorityConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Priority classes.

    Latency-sensitive (LS) work preempts best-effort (BE) work between layers; BE work has a
    guaranteed share of the time.
    """

    preempt: bool = True
    """Run LS work at the next yield point of BE work. false: a running batch completes first."""
    ls_ttft_s: Annotated[float, Meta(ge=0)] = 1.0
    """Target time to first token of LS requests, in seconds after arrival. 0: immediately; BE work
    is then held back while an LS prompt runs."""
    ls_tbt_s: Seconds = 0.2
    """Target time between tokens of LS requests, in seconds. While BE work runs, decodes are
    coalesced within this target; a lower value gives faster tokens and less BE throughput."""
    be_share: Annotated[float, Meta(ge=0, le=0.9)] = 0.1
    """Minimum share of a rank's time for BE work while BE work is waiting."""
    ls_max_wait_s: Seconds = 10.0
    """Maximum estimated queueing delay of an LS request, in seconds, at the measured rate. Requests
    above it are rejected with 429 and Retry-After. Equal to ls_ttft_s, it admits only requests that
    can meet their target."""
    be_max_wait_s: Seconds = 300.0
    """Maximum estimated queueing delay of a BE request, in seconds, if BE gets exactly be_share.
    http.request_timeout_s applies if it is lower."""
    policy: str | None = None
    """Custom policy as package.module:name (docs/policies.md). null: Algorithm 1 of QLLM: LS by
    deadline, then the order of the plan."""
