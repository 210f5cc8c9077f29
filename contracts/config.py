"""The configuration: frozen structs, decoded once by `load_config` and passed by value.

msgspec checks the bounds of fields when it decodes; `__post_init__` checks rules across fields. The
string below a field is its meaning, with the unit, in `tandem config` and docs/configuration.md.
"""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from contracts.api_keys import ApiKey, api_key, check_keys, check_operator_key
from contracts.device_modes import refusal
from contracts.plan import Order, Plan

Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
# The command line makes relative paths absolute, because ranks run in other folders. InputPath: an
# existing file or folder, or a name ("bundled"). OutputFolder: created if it does not exist.
InputPath = Annotated[str, Meta(extra={"path": "input"})]
OutputFolder = Annotated[str, Meta(extra={"path": "output"})]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of a section."""


BUNDLED = "bundled"


class ModelConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint to serve."""

    path: InputPath = BUNDLED
    """A Hugging Face folder, a hub id such as Qwen/Qwen3-30B-A3B, with @REVISION for a branch, tag
    or commit, or "bundled" for the model in the package."""
    name: str | None = None
    """Model name in the API. null: the hub id, or the name of the folder."""
    generation_config: Literal["auto", "ignore"] = "auto"
    """Where a request's sampling defaults come from. "auto": generation_config.json of the
    checkpoint. "ignore": temperature 1, no other restriction."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the computation. "auto": that of the checkpoint, but float32 for float16."""
    max_context_tokens: Count | None = None
    """Maximum tokens of a sequence, prompt and answer together. null: the checkpoint's own maximum,
    which is also the upper bound of this setting."""

    def context_tokens(self, checkpoint_tokens: int) -> int:
        return min(checkpoint_tokens, self.max_context_tokens or checkpoint_tokens)


class GroupsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number, placement and lifecycle of ranks.

    Either pipeline may have 0 ranks; the other one then serves its requests as well.
    """

    attention_ranks: NonNegative = 1
    """Ranks of the attention group. attention_ranks and expert_ranks are both at least 1, or
    both 0."""
    expert_ranks: NonNegative = 1
    """Ranks of the expert group. The routed experts of each layer are divided among them."""
    prefill_ranks: NonNegative = 0
    """Workers of the prefill pipeline, which serves classification, scores and completions of one
    token."""
    colocated: Literal["never", "auto"] = "never"
    """Generation in one process per attention rank, which has all weights and sends no packets.
    "auto": prefill workers with resident experts take the place of attention and expert ranks where
    their weights fit half of this machine's free memory, and planner.hardware, if given, predicts
    that it is faster. Each gets the threads of the ranks it replaces."""
    ingress_replicas: Count = 1
    """HTTP server processes. With http.front=direct they share one port, and the kernel distributes
    connections. Limits on connections, memory and keys apply to each replica; schedule.max_waiting
    is divided among them."""
    placement: Literal["pack", "spread"] = "pack"
    """Placement of ranks on nodes. "pack": on as few nodes as possible. "spread": the attention
    group and the expert group on different nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the computation. "auto": GPUs if the Ray cluster has them."""
    cpus_per_rank: Annotated[float, Meta(ge=0)] = 0.25
    """CPUs that each rank reserves in Ray. This affects placement and does not limit usage."""
    torch_threads: Count = 1
    """Threads of each rank's computation. Attention and expert ranks of a node compute in turn, so
    each can have all its cores."""
    attention_resources: dict[str, float] = {}
    """Additional Ray resources of each attention rank, by name."""
    expert_resources: dict[str, float] = {}
    """Additional Ray resources of each expert rank, by name."""
    prefill_resources: dict[str, float] = {}
    """Additional Ray resources of each prefill worker, by name."""
    address: str | None = None
    """Address of the Ray cluster. null: RAY_ADDRESS if it is set; otherwise a local cluster is
    started."""
    orphan_timeout_s: Seconds = 60.0
    """Seconds that ranks continue without a launcher. Ray restarts the launcher, which then adopts
    the ranks. Ranks that are not adopted in time exit."""
    ready_timeout_s: Seconds = 180.0
    """Seconds for ranks to be placed, load the model and connect. Requests wait for the same time
    if their pipeline has no rank left."""
    launcher_timeout_s: Seconds = 30.0
    """Seconds without an answer from the launcher after which the server exits with status 3
    (`tandem serve`). Ray needs about ten seconds to restart a launcher on a busy machine."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86400)] = 20.0
    """Seconds that a rank continues with its requests after a request to stop (`tandem scale`,
    SIGTERM). New requests go to other ranks. Requests that remain at the end continue on other
    ranks from the last generated token."""
    recovery_timeout_s: Seconds = 300.0
    """Seconds that requests wait for the replacement of a lost attention or expert rank. After that
    they fail with the name of the rank, and the server exits with status 3 (`tandem serve`) or is
    restarted (`serve run`). Increase it if a rank takes longer to load."""

    @property
    def ranks(self) -> int:
        """Number of ranks, without the planner."""
        return self.attention_ranks + self.expert_ranks + self.prefill_ranks

    def __post_init__(self) -> None:
        if (self.attention_ranks == 0) != (self.expert_ranks == 0):
            raise ValueError(
                f"attention_ranks={self.attention_ranks} with expert_ranks={self.expert_ranks}: "
                "they work together; give both at least 1, or both 0"
            )
        if self.ranks == 0:
            raise ValueError(
                "no ranks at all: give attention_ranks and expert_ranks, or "
                "prefill_ranks, at least 1"
            )


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


class KvConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV cache of a rank, and sharing of prefixes."""

    block_tokens: Count = 16
    """Tokens per block. It is part of the block hash and equal on all ranks."""
    pool_tokens: Count | None = None
    """Capacity of a rank's pool in tokens. null: derived from free memory."""
    state_slots: Count | None = None
    """Recurrent states that a rank holds for models with such layers, of running sequences and at
    ends of prefixes. null: 4 per sequence of a batch, in at most half of the pools' memory."""
    memory_fraction: Annotated[float, Meta(gt=0, le=0.9)] | None = None
    """Fraction of free memory for KV pools if pool_tokens is null. null: 0.2 on CPUs, where the
    ranks of a node share it; 0.9 on a GPU, of what weights and the largest batch leave."""
    prefix_cache: bool = True
    """Keep blocks of earlier prompts and answers for reuse."""
    share_partial_blocks: bool = True
    """Reuse prefixes that end inside a block. false: whole blocks only."""
    share_between_keys: bool = False
    """Share prefixes between requests with different http.api_keys. If true, `cached_tokens` and
    response times reveal to a client what others have sent."""

    def fraction(self, *, on_gpu: bool) -> float:
        """Return `memory_fraction` or its default on the device."""
        default = 0.9 if on_gpu else 0.2
        return default if self.memory_fraction is None else self.memory_fraction


class ScheduleConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plan that is used without a planner, and limits of a batch."""

    order: Order = Order.ASAS
    """Order of attention (A) and shared-expert (S) tasks on an attention rank. naive and pppipe: S
    before dispatch. asas: A S A S. aass: all A of a layer first."""
    r1: Count = 2
    """Micro-batches per batch."""
    r2: Count = 1
    """Token groups per micro-batch; each is dispatched separately. Values above 1 require asas or
    aass."""
    min_split_tokens: Count = 32
    """Minimum tokens of a micro-batch or token group. Smaller batches have fewer
    parts."""
    max_batch_tokens: Count = 4096
    """Maximum tokens of a batch on an attention rank."""
    max_batch_sequences: Count = 256
    """Maximum sequences of a batch on an attention rank."""
    cuda_graphs: bool | None = None
    """CUDA graphs of the attention half of batches in decode, captured when a size is first needed.
    null: where they are possible."""
    max_waiting: Count = 1024
    """Maximum sequences per rank and priority class that wait for a first result. Further requests
    are rejected with 429."""
    request_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Maximum share of a batch and of max_waiting for one client request while others wait. At
    least one of its sequences is always allowed."""

    def __post_init__(self) -> None:
        Plan(r1=self.r1, r2=self.r2, order=self.order)  # raises if they are inconsistent


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


SCALABLE = ("resident", "streamed", "cached")  # modes in which a worker needs no other worker


class PrefillConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers of the prefill pipeline (groups.prefill_ranks)."""

    experts: Literal[
        "resident", "gathered", "streamed", "hybrid", "all_to_all", "shuffled", "cached"
    ] = "resident"
    """Storage of expert weights. "resident": all in the worker's memory. "gathered": 1/N of each
    layer in memory, the rest fetched from other workers during compute. "streamed": read from a
    host store during compute. "hybrid": 1/N from the host store, the rest gathered. "all_to_all":
    1/N in memory, activations are exchanged instead of weights (the DP+EP baseline). "shuffled": as
    "gathered", but idle workers compute a long prompt together. "cached": as many as section
    `experts` allows, the others read on demand from a file in host_store, or from pinned host
    memory on a GPU."""
    resident_layers: Count = 1
    """Layers whose experts stay in memory in every mode, starting with the first."""
    shard_prefetch_layers: Count = 2
    """Layers that a worker reads ahead from the host store with "hybrid"."""
    host_store: OutputFolder | None = None
    """Folder for the expert file of "streamed" and "hybrid". The file is created if the checkpoint
    stores experts in another layout. null: the system's temporary folder."""
    locality_weight: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """Load, in multiples of a request's work, that routing accepts with "all_to_all" for a worker
    that has all experts predicted for the prompt, and in proportion for a part of them. Predictions
    come from experts.profile. 0: route by prefix and load alone."""
    packed_experts: bool = True
    """Transfer experts in the layout of the processor's kernels. false: as plain matrices, for
    workers on different processors."""
    disable_kv_cache: bool = False
    """Run workers without KV pool and prefix cache. Prefixes are then shared within a batch
    only."""
    max_batch_tokens: Count = 4096
    """Maximum tokens of a batch on a prefill worker."""
    max_batch_sequences: Count = 256
    """Maximum sequences of a batch on a prefill worker."""
    saturation: Count | None = None
    """Saturation threshold of a worker in FLOPs of queued work. null: calibrated at run time."""
    saturation_margin: Annotated[float, Meta(ge=0, le=10)] = 0.1
    """Fraction added to the calibrated saturation threshold (gamma in Eq. 1), which is the work
    that hides all transfers."""
    engine: str = "torch"
    """Compute engine: "torch", or package.module:function that makes the worker, for tests."""


class ScalingConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Autoscaling of prefill workers between groups.prefill_ranks and max_prefill_ranks.

    The utilization of a worker is the work of its open requests over its saturation threshold
    (prefill.saturation).
    """

    max_prefill_ranks: Count | None = None
    """Maximum prefill workers. null: no autoscaling. Requires prefill.experts=resident, streamed or
    cached."""
    scale_up_utilization: Annotated[float, Meta(gt=0, le=100)] = 0.8
    """Scale up when mean utilization exceeds this."""
    scale_down_utilization: Annotated[float, Meta(ge=0, le=100)] = 0.4
    """Scale down when the mean utilization of the remaining workers would stay below this. Must be
    below scale_up_utilization."""
    look_back_period_s: Seconds = 5.0
    """Seconds over which utilization is averaged. After a change no decision is made for as
    long."""
    downscale_delay_s: Seconds = 60.0
    """Seconds that a worker must be redundant before it is drained and stopped."""

    def __post_init__(self) -> None:
        if self.scale_down_utilization >= self.scale_up_utilization:
            raise ValueError(
                f"scaling.scale_down_utilization={self.scale_down_utilization:g} is not below "
                f"scale_up_utilization={self.scale_up_utilization:g}: workers would start and "
                "stop at the same load"
            )


class ExpertsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts that do not fit into memory.

    The section applies to expert ranks if `slots` or `bytes` is set, and to prefill workers with
    prefill.experts=cached; `storage_format` also to resident experts.
    """

    slots: Count | None = None
    """Experts that a worker keeps in memory, over all layers. null: see `bytes`."""
    bytes: Count | None = None
    """Bytes of experts that a worker keeps in memory. null: see `slots`. If both are null, an
    expert rank keeps all of its experts."""
    storage_format: bool | None = None
    """Keep experts in the checkpoint's format (fp8, int8, MXFP4, bfloat16 for float32), which
    products unpack: more experts fit, generation reads fewer bytes, answers are equal. `bytes`
    counts stored bytes. null: on CPUs without matrix units for model.dtype."""
    eviction_policy: Literal["walk", "lru"] = "walk"
    """Expert to evict first. "walk": the least recently used one of the layer whose next use is
    farthest away. "lru": least recently used."""
    predictor: Literal["none", "router", "fitted", "quasi", "estimator"] | None = None
    """Predictor of the next layer's experts, which are prefetched. "router": the next layer's
    router on this layer's state. "fitted": a least-squares fit. "quasi": the next router, with the
    mean output of this layer's experts added. "estimator": a small network. null: the best one of
    the profile for each layer; without a profile "router"."""
    speculative: Literal["exact", "speculated"] = "exact"
    """Experts of generated tokens. "speculated": the predicted experts instead of the router's
    choice, which is a different model and is reported in /v1/models. Prompts are always exact."""
    speculative_layers: tuple[int, ...] | None = None
    """Layers with speculation. null: all layers that follow another layer with experts."""
    speculative_weights: Literal["router", "predicted"] = "router"
    """Weights of speculated experts. "router": from the layer's router. "predicted": from the
    prediction, as in the paper."""
    profile: InputPath | None = None
    """File written by `tandem profile --routing`. null: routing.safetensors beside the checkpoint,
    if present; the bundled model has one."""
    direct_io: bool | None = None
    """Read experts past the page cache. null: only if their file is larger than free memory."""

    @property
    def is_bounded(self) -> bool:
        """True if the number of experts in memory is limited."""
        return self.slots is not None or self.bytes is not None

    def __post_init__(self) -> None:
        if self.slots is not None and self.bytes is not None:
            raise ValueError(
                f"experts.slots={self.slots} and experts.bytes={self.bytes}: give one of them"
            )
        if self.speculative == "speculated" and not self.is_bounded:
            raise ValueError(
                "experts.speculative=speculated: where all experts are resident nothing is "
                "predicted: set experts.slots or experts.bytes, or experts.speculative=exact"
            )
        if self.speculative == "speculated" and self.predictor == "none":
            raise ValueError(
                "experts.speculative=speculated runs what is predicted, and "
                "experts.predictor=none: set experts.predictor to null"
            )


class PlacementConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Assignment of experts to expert ranks, replicas, and rebalancing under traffic."""

    file: InputPath | None = None
    """File written by `tandem place`, for expert ranks, or for prefill workers with "all_to_all" if
    there are no expert ranks. null: experts in order, one replica each."""
    spare_slots: NonNegative = 0
    """Additional slots per layer and expert rank, for replicas made by rebalancing. The number in
    `file` takes precedence."""
    rebalance: Literal["off", "once", "continuous"] = "off"
    """Move experts according to traffic: never, once after enough samples, or continuously."""
    move_timeout_s: Seconds = 60.0
    """Seconds that a move may take. After that it is cancelled and the current placement stays."""
    max_move_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    """Maximum bytes of experts that a rank loads for one move, which is also the additional memory
    it needs. Larger changes are made in several moves."""
    bytes_per_s: Annotated[float, Meta(gt=0)] = 100e6
    """Maximum bytes per second at which a rank loads experts while serving."""
    payback_s: Seconds = 60.0
    """Seconds of traffic within which a move must save more time than it costs."""
    sample_tokens: Count = 256
    """Tokens per second whose routing each attention rank records."""
    record: OutputFolder | None = None
    """Folder in which the planner writes a routing profile, routing.safetensors, once a minute and
    at exit. null: no profile."""


class PlannerConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Planner that chooses a plan for every batch. Without a plan, section `schedule` applies."""

    enabled: bool = True
    """Run the planner. false: section `schedule` applies."""
    hardware: InputPath | None = None
    """File written by `tandem profile`, or the name of a bundled one. null: learned from
    measurements of the ranks."""
    refit: bool = True
    """Update the hardware file's figures from measurements. false requires `hardware`."""
    extended_search: bool = True
    """Include plans outside FinDEP's search space."""
    answer_timeout_s: Seconds = 1.0
    """Seconds after which a rank reports a missing answer and stops sending requests until it
    arrives."""
    report_interval_s: Annotated[float, Meta(ge=0, le=3600)] = 0.1
    """Seconds between two measured batches of a rank. 0: every batch is measured."""

    def __post_init__(self) -> None:
        if self.hardware is None and not self.refit:
            raise ValueError(
                "planner.refit=false without planner.hardware: stage times are unknown; "
                "name a hardware file, or set planner.enabled=false"
            )


class ServeConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The application on its Ray cluster."""

    name: str = "tandem"
    """Application name, unique on the Ray cluster: 1 to 40 letters, digits and "-", "_", ".",
    starting and ending with a letter or digit. Behind Serve it is that of the application."""

    def __post_init__(self) -> None:
        if re.fullmatch(r"[a-z0-9]([a-z0-9._-]{0,38}[a-z0-9])?", self.name, re.I | re.A) is None:
            raise ValueError(
                f"name={self.name!r}: use 1 to 40 letters, digits and - _ ., a letter or digit "
                "first and last"
            )


LOOPBACK = ("127.0.0.1", "::1", "localhost")


class HttpConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HTTP server: authentication, connections, and limits of a request."""

    front: Literal["direct", "serve"] = "direct"
    """HTTP front end. "direct": the ingress listens on host:port, without a Ray call per streamed
    token. "serve": behind Ray Serve's proxy (`serve run`), which has its own host and port."""
    host: str = "127.0.0.1"
    """Listening address with front=direct."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Listening port with front=direct. `tandem serve` rejects 0."""
    max_body_bytes: Count = 8 << 20
    """Maximum bytes of a request body. Larger bodies are rejected with 413."""
    max_batch_items: Count = 4096
    """Maximum texts of a classification request, or sequences of a completion request."""
    request_timeout_s: Seconds = 600.0
    """Maximum seconds of a request in total. After that it fails with 504."""
    api_keys: list[str | ApiKey] = []
    """Bearer tokens for model requests. Empty: no authentication. An entry is a token or {key:
    TOKEN, priority: be, tenant: NAME}: priority is the default class of its requests (ls if not
    given), tenant the group of tokens with which it shares turns (none). fixed_priority: true
    forbids another class in a request. requests_per_s, tokens_per_s (long-term rates) and
    concurrency (simultaneous requests) limit its use."""
    keys_file: InputPath | None = None
    """YAML or JSON file with api_keys and optionally metrics_key, in place of api_keys here.
    Changes apply within seconds. An invalid file is ignored and the previous keys stay."""
    allow_public: bool = False
    """Allow a server without keys to listen on an address that other machines can reach."""
    metrics_key: str | None = None
    """Bearer token for /metrics, /load, /status, /trace and the exporters. null: no authentication.
    One in keys_file takes precedence, for exporters on machines that have the file."""
    operator_key: str | None = None
    """Bearer token for /scale (`tandem scale`). null: with front=direct on 127.0.0.1 and without
    keys /scale is open to this machine; otherwise it is disabled."""
    tls_certificate: InputPath | None = None
    """PEM file; requires tls_key. null: plain HTTP."""
    tls_key: InputPath | None = None
    """PEM file; requires tls_certificate."""
    root_path: str = ""
    """Path prefix that a reverse proxy removes, such as /llm."""
    allowed_origins: list[str] = []
    """Origins of web pages that may send model requests (CORS), such as https://chat.example.org.
    "*": all."""
    access_log: bool = True
    """Log a line per request (logger tandem.access), without request text."""
    access_log_exclude: list[str] = []
    """Paths whose successful requests are not logged, such as /health and /metrics."""
    max_header_bytes: Annotated[int, Meta(ge=256, le=1 << 20)] = 16 << 10
    """Maximum bytes of request line and headers, or of the trailers of a body."""
    max_headers: Count = 100
    """Maximum headers of a request, or trailers of its body."""
    max_connections: Count | None = None
    """Maximum connections. null: from the descriptor limit, up to 8192. At the limit the server
    closes the oldest connection that has not sent a valid key (or, without keys, a complete
    request), then the longest idle one; if all are active it refuses the new one."""
    max_connections_per_address: Count | None = None
    """Maximum connections per client address, for servers without a proxy. null: no limit."""
    header_timeout_s: Seconds = 10.0
    """Seconds from accepting a connection, or from the first byte of a further request, to the end
    of its headers."""
    keep_alive_timeout_s: Seconds = 75.0
    """Seconds that a connection may be idle between requests."""
    body_timeout_s: Seconds = 60.0
    """Seconds from the end of the headers to the end of the body, also with front=serve."""
    write_timeout_s: Seconds = 60.0
    """Seconds that a client may read its response at less than 1 KiB/s before it is
    disconnected."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86400)] = 20.0
    """Seconds that the server completes open requests after SIGTERM or Ctrl-C; new requests get
    503. A second signal stops it at once. Also applies when `serve deploy` removes or redeploys the
    application."""

    @property
    def clients(self) -> list[ApiKey]:
        return [api_key(each) for each in self.api_keys]

    @property
    def has_keys(self) -> bool:
        """True if model requests need a key."""
        return bool(self.api_keys) or self.keys_file is not None

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        return self.front == "direct" and self.host in LOOPBACK

    def __post_init__(self) -> None:
        check_keys(self.clients, self.metrics_key)
        check_operator_key(
            self.operator_key, [*(one.key for one in self.clients), self.metrics_key]
        )
        if self.api_keys and self.keys_file is not None:
            raise ValueError(
                f"api_keys and keys_file={self.keys_file}: give one of them; all keys in the file"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                "tls_certificate and tls_key belong together (--ssl-certfile, --ssl-keyfile): "
                "give both, or neither"
            )
        if self.tls_certificate is not None and self.front == "serve":
            raise ValueError(
                "tls_certificate has no effect with front=serve: encrypt in front of Serve's proxy"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ValueError(
                    f"allowed_origins: {origin!r}: give scheme, host and port as a browser does, "
                    "such as https://chat.example.org, or *"
                )
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII):
            raise ValueError(
                f"root_path={self.root_path!r}: give a path such as /llm, without a slash at the "
                "end"
            )


class LimitsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size limits of a request, and memory limits of all open requests of an ingress.

    Requests above them are rejected with 413, or with 429 if other requests use the memory.
    """

    passes: Count = 65_536
    """Maximum sequences of a request: rows x passes of their labels, or prompts x n."""
    pass_tokens: Count = 1 << 25
    """Maximum tokens of all sequences of a request, including tokens to generate. A prompt is also
    limited to the characters of a full context of the longest tokens."""
    label_tokens: Count = 65_536
    """Maximum tokens of all labels of a classification request."""
    answer_bytes: Annotated[int, Meta(ge=1 << 10, le=128 << 20)] = 64 << 20
    """Maximum estimated bytes of a JSON response; log-probabilities are most of it."""
    open_bytes: Annotated[int, Meta(ge=1 << 20)] = 512 << 20
    """Maximum bytes held by all open requests: bodies, texts, tokens, scores, responses."""
    request_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Maximum fraction of open_bytes for one request."""
    tokenizing_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    """Threads that tokenize long texts in chunks; requests take turns."""

    @property
    def request_bytes(self) -> int:
        return int(self.open_bytes * self.request_fraction)


class BatchConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files and batches: `/v1/files`, `/v1/batches`. They are run on the head node."""

    storage: OutputFolder | None = None
    """Folder, or URL of any fsspec filesystem whose package is installed (s3://BUCKET/FOLDER, with
    s3fs), of files and batches. They outlive the server. null: $XDG_STATE_HOME/tandem/NAME."""
    file_bytes: Count = 512 << 20
    """Maximum bytes of an uploaded file."""
    requests: Count = 1_000_000
    """Maximum requests of a batch."""
    key_bytes: Count = 16 << 30
    """Maximum bytes of all files of an API key."""
    key_batches: Count = 32
    """Maximum unfinished batches of an API key."""
    in_flight_rows: Count = 256
    """Requests of all batches that are sent at a time; of one batch at most 32, or 1/4000 of its
    requests if that is more. A lost process repeats at most these."""
    keep_days: Annotated[float, Meta(gt=0)] = 30.0
    """Days after which files, and batches that have ended, are deleted."""


class LogConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Level, format and files of the log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of logged events."""
    format: Literal["text", "json"] = "text"
    """Format of a line. "text": key=value pairs. "json": one object."""
    prompts: bool = False
    """Allow client text in the log: request bodies (logger tandem.prompts) and error messages that
    may quote them."""
    stall_threshold_s: Seconds = 10.0
    """Seconds that one step of an event loop may take before the stacks of all threads are logged
    once (`event_loop_blocked`)."""
    folder: OutputFolder | None = None
    """Parent folder of the run folders. null: $XDG_STATE_HOME/tandem/NAME with `tandem serve`,
    otherwise standard error only."""
    runs: Count = 10
    """Run folders to keep."""
    max_file_bytes: Annotated[int, Meta(ge=1 << 16)] = 64 << 20
    """Maximum bytes of a log file before rotation; one rotated file is kept."""


class MetricsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metric exporters of the processes (docs/monitoring.md)."""

    exporters: bool = True
    """Serve each process's own metrics on a free port: ranks, planner, ingresses, launcher, bulk
    jobs. The ingress's /metrics does not depend on it."""
    host: str | None = None
    """Listening address of exporters. null: 127.0.0.1, or the node's address if the Ray cluster has
    several nodes."""
    targets: OutputFolder | None = None
    """Folder, on the launcher's node, for the list of exporters that Prometheus reads
    (NAME_service_discovery.json). null: /dev/shm/tandem-metrics."""


FROM_ENVIRONMENT = "environment"
TRACES_PATH = "/v1/traces"


class TraceConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeline of a rank's tasks, and OpenTelemetry spans of requests."""

    spans: NonNegative = 20_000
    """Latest task spans that each rank keeps. 0: recording is off."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP/HTTP), such as http://127.0.0.1:4318, which receives
    spans of requests. A URL without a path gets /v1/traces. "environment": that of
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT. null: no spans. Requires
    tandem-moe[otel]. Other OTEL_ variables apply: headers, service name, sampler."""

    def __post_init__(self) -> None:
        if self.otlp_endpoint in (None, FROM_ENVIRONMENT):
            return
        try:
            parts = urlsplit(self.otlp_endpoint)
            works = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            works = False
        if not works:
            raise ValueError(
                f"otlp_endpoint={self.otlp_endpoint!r}: use a URL such as http://127.0.0.1:4318, "
                f"or {FROM_ENVIRONMENT}"
            )


class TandemConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one application."""

    model: ModelConfig = ModelConfig()
    groups: GroupsConfig = GroupsConfig()
    channel: ChannelConfig = ChannelConfig()
    kv: KvConfig = KvConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    priority: PriorityConfig = PriorityConfig()
    prefill: PrefillConfig = PrefillConfig()
    scaling: ScalingConfig = ScalingConfig()
    experts: ExpertsConfig = ExpertsConfig()
    placement: PlacementConfig = PlacementConfig()
    planner: PlannerConfig = PlannerConfig()
    serve: ServeConfig = ServeConfig()
    http: HttpConfig = HttpConfig()
    limits: LimitsConfig = LimitsConfig()
    batch: BatchConfig = BatchConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    trace: TraceConfig = TraceConfig()

    def __post_init__(self) -> None:
        if self.prefill.experts == "cached" and not self.experts.is_bounded:
            raise ValueError(
                "prefill.experts=cached: set the number of experts a worker keeps, of all layers "
                "together: experts.slots, or experts.bytes"
            )
        self._check_scaling()
        reason = "" if self.groups.device == "auto" else refusal(self, self.groups.device)
        if reason:
            raise ValueError(reason)

    def _check_scaling(self) -> None:
        most, least = self.scaling.max_prefill_ranks, self.groups.prefill_ranks
        if most is None:
            return
        if not 1 <= least <= most:
            raise ValueError(
                f"scaling.max_prefill_ranks={most} with groups.prefill_ranks={least}: give 1 or "
                f"more to begin with, and at most {most}"
            )
        if self.prefill.experts not in SCALABLE:
            raise ValueError(
                f"scaling.max_prefill_ranks with prefill.experts={self.prefill.experts}: its "
                f"workers divide the experts among them; use {', '.join(SCALABLE)}"
            )

    @property
    def prefill_slots(self) -> int:
        return self.scaling.max_prefill_ranks or self.groups.prefill_ranks
