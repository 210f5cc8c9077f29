"""The one configuration: frozen structs, decoded once by `load_config`, passed by value.

Bounds are checked by msgspec on decoding; rules across fields stand in `__post_init__`. What a key
means, with its unit, stands below its field: `tandem config` and docs/configuration.md show that.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from contracts.api_keys import ApiKey, api_key, check_keys, check_operator_key
from contracts.plan import Order, Plan

Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
# The command line makes relative ones absolute, for ranks stand elsewhere. InputPath: of something
# that is there, or a name ("bundled"); OutputFolder: may have to be made.
InputPath = Annotated[str, Meta(extra={"path": "input"})]
OutputFolder = Annotated[str, Meta(extra={"path": "output"})]

BUNDLED = "bundled"
SPIN_S = 0.005
LOOPBACK = ("127.0.0.1", "::1", "localhost")
SCALABLE = ("resident", "streamed", "cached")  # prefill.experts of workers that stand alone


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ModelConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint, and what of it is served."""

    path: InputPath = BUNDLED
    """A Hugging Face folder, a hub id such as Qwen/Qwen3-30B-A3B, or "bundled" for the model in the
    package."""
    name: str | None = None
    """What clients call the model. null: as its folder."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What is computed in. "auto": as the checkpoint is stored, but float32 for float16."""
    max_context_tokens: Count | None = None
    """The longest sequence that is served, prompt and answer together. null: what the checkpoint
    states, and never more than that."""

    def context_tokens(self, stated: int) -> int:
        """The longest sequence that is served of a checkpoint that states so many tokens."""
        return min(stated, self.max_context_tokens or stated)


class GroupsConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and placement of the attention and expert groups, and of the prefill workers. Either
    pipeline may be left out (0 ranks): the other one then does its work too."""

    attention_ranks: NonNegative = 1
    """Ranks of the attention group. With expert_ranks they are one pipeline: both at least 1, or
    both 0."""
    expert_ranks: NonNegative = 1
    """Ranks of the expert group, among which the routed experts of each layer are divided."""
    prefill_ranks: NonNegative = 0
    """Workers of the prefill pipeline: classification, scores, and completions of one token."""
    ingress_replicas: Count = 1
    """HTTP fronts. With http.front direct all listen on the one port, and Linux deals connections
    out. Bounds on connections, memory and keys are each one's; of schedule.max_waiting each has its
    part."""
    placement: Literal["pack", "spread"] = "pack"
    """ "pack": ranks on as few nodes as fit. "spread": the attention group and the expert group on
    different nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute. "auto": on GPUs where the Ray cluster has them."""
    cpus_per_rank: Annotated[float, Meta(ge=0)] = 0.25
    """CPUs that each rank asks Ray for: a share in placement, no bound on what it uses."""
    torch_threads: Count = 1
    """Threads of a rank's products."""
    attention_resources: dict[str, float] = {}
    """Extra Ray resources, by name, that each attention rank asks for."""
    expert_resources: dict[str, float] = {}
    """Extra Ray resources, by name, that each expert rank asks for."""
    prefill_resources: dict[str, float] = {}
    """Extra Ray resources, by name, that each prefill worker asks for."""
    address: str | None = None
    """Of the Ray cluster. null: RAY_ADDRESS if that is set, else a local cluster is started."""
    orphan_timeout_s: Seconds = 60.0
    """Seconds for which ranks go on when the process that looks after them (Groups) has ended: so
    long it has to be started again, by Ray, and to take them over. Then they end."""
    ready_timeout_s: Seconds = 180.0
    """Seconds until ranks must be placed, loaded and joined. Also how long requests wait while no
    rank of their pipeline is left."""
    launcher_timeout_s: Seconds = 30.0
    """Seconds for which the process that looks after the ranks (Groups) may be silent before the
    server ends (`tandem serve`, exit status 3): so long another one has to be started by Ray, which
    takes some ten on a busy machine."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86400)] = 20.0
    """Seconds for which a rank that is to go (`tandem scale`, SIGTERM) goes on with the requests
    that it has, while new ones go elsewhere. What is left then goes on on another rank, from where
    it is."""
    recovery_timeout_s: Seconds = 300.0
    """Seconds for which requests wait for another attention or expert rank in the place of one that
    is lost. Then they fail with its name, and the server ends (`tandem serve`, exit status 3) or is
    started again (`serve run`). A rank that loads for longer needs more."""

    @property
    def ranks(self) -> int:
        """All that compute: the planner is none of them."""
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


class ChannelConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How ranks are joined, and when a peer counts as lost."""

    backend: Literal["auto", "shm", "tcp", "nccl", "ipc"] = "auto"
    """What moves payloads between ranks. "auto" follows placement: nccl between GPUs, shm on one
    node, else tcp. ipc, for ranks that share one GPU, is chosen by name only."""
    heartbeat_interval_s: Seconds = 0.2
    """Seconds between two heartbeats of a rank."""
    heartbeat_timeout_s: Seconds = 1.5
    """Seconds without a heartbeat after which a peer counts as hung, at least twice heartbeat_s. On
    the same machine after four times as long, and a third as long if its process is stopped."""
    step_timeout_s: Seconds = 60.0
    """Seconds for which a rank's loop may be in one step (a layer, or less) before its heartbeats
    end."""
    reply_timeout_s: Seconds = 300.0
    """Seconds after which an expert rank that goes on beating, but has answered nothing of an
    attention rank, is lost to it."""
    connect_timeout_s: Seconds = 10.0
    """Seconds that connecting, a handshake or a blocked send may take."""
    spin_s: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Seconds after a payload during which a waiting rank polls without sleeping: to wake a core
    costs more than a short wait. null: 0.005 where a node has a core for each rank, else 0."""
    segment_bytes: Annotated[int, Meta(ge=4096)] = 8 << 20
    """Bytes of a segment of memory through which a link sends over shm and ipc; doubled until a
    payload fits."""

    def __post_init__(self) -> None:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s} must be at least twice "
                f"heartbeat_interval_s={self.heartbeat_interval_s}"
            )


class KvConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV pool of a rank, and whose prefixes are found again."""

    block_tokens: Count = 16
    """Tokens of a block. Part of the block hash: all ranks must agree."""
    pool_tokens: Count | None = None
    """Tokens that a rank's pool holds. null: chosen from the free memory."""
    memory_fraction: Annotated[float, Meta(gt=0, le=0.9)] = 0.2
    """Of the free memory, for the pools: a node's, shared by its ranks of both pipelines, or a
    GPU's, where each rank has its own. Counts where pool_tokens is null."""
    prefix_cache: bool = True
    """Whether blocks of earlier prompts and answers are found again."""
    share_partial_blocks: bool = True
    """Whether prefixes are also shared by parts of a block. false: by whole blocks only."""
    share_between_keys: bool = False
    """Whether requests with different http.api_keys find each other's prefixes; then
    `cached_tokens`, and the time of an answer, tell a client what others have sent."""


class ScheduleConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan used where no planner answers, and the limits of a batch."""

    order: Order = Order.ASAS
    """In which order an attention rank runs attention (A) and shared experts (S): naive and pppipe,
    S before dispatch; asas, A S A S; aass, all A of a layer first."""
    r1: Count = 2
    """Micro-batches of a batch."""
    r2: Count = 1
    """Token groups of a micro-batch, each dispatched by itself. Other than 1 with asas and aass
    only."""
    min_split_tokens: Count = 32
    """Tokens that a micro-batch or token group has at least: a smaller batch is cut into fewer."""
    max_batch_tokens: Count = 4096
    """Tokens of a batch at most, on attention ranks."""
    max_batch_sequences: Count = 256
    """Sequences of a batch at most, on attention ranks."""
    max_waiting: Count = 1024
    """Sequences per rank and class of which nothing has come back yet: beyond, requests are refused
    with 429."""
    request_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Of a batch, and of the places of max_waiting, what one client request may hold while others
    are there too (at least one sequence of it)."""

    def __post_init__(self) -> None:
        Plan(r1=self.r1, r2=self.r2, order=self.order)  # raises if they do not fit together


class PriorityConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two classes of requests: latency-sensitive (LS) ones overtake best-effort (BE) ones inside a
    pass, and BE has a share that LS cannot take."""

    preempt: bool = True
    """Whether LS work runs at the next yield of BE work. false: a batch that runs ends first."""
    ls_ttft_s: Annotated[float, Meta(ge=0)] = 1.0
    """Seconds from the arrival of an LS request within which its first token is due. 0: at once;
    then BE work is held back while any LS prompt runs."""
    ls_tbt_s: Seconds = 0.2
    """Seconds after a token of an LS request within which its next one is due. While BE work runs,
    decodes wait for one another as long as they are in time: less is faster tokens, and less BE."""
    be_share: Annotated[float, Meta(ge=0, le=0.9)] = 0.1
    """Of a rank's time, what BE work gets at least while some waits there."""
    ls_max_wait_s: Seconds = 10.0
    """Seconds that the LS work ahead of an LS request may last, by the measured drain, for it to be
    accepted; else it is refused with 429 and told when to come again. With ls_ttft_s here, nobody
    is let in who would be late."""
    be_max_wait_s: Seconds = 300.0
    """Seconds that the BE work ahead of a BE request may last, if BE gets its share and no more,
    for it to be accepted; http.request_timeout_s, if that is less."""
    policy: str | None = None
    """package.module:name of a policy of your own (docs/policies.md). null: QLLM's Algorithm 1, LS
    by due time, then the order of the plan."""


class PrefillConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers of the prefill pipeline (groups.prefill_ranks of them)."""

    experts: Literal["resident", "gathered", "streamed", "hybrid", "all_to_all", "cached"] = (
        "resident"
    )
    """Where a worker finds the experts of a layer. "resident": all in its memory. "gathered": 1/N
    of each layer in its memory, the rest fetched from the other workers behind compute. "streamed":
    read from a host store behind compute. "hybrid": its own 1/N from the host store, and from there
    gathered. "all_to_all": 1/N, and activations travel instead of weights, in lockstep (the
    baseline, DP+EP). "cached": as many as the section `experts` says, the others read when they are
    wanted, from a file in `host_store`; on a GPU from the host's memory, pinned."""
    resident_layers: Count = 1
    """Layers whose experts stay in memory all the same, the first of them included."""
    shard_prefetch_layers: Count = 2
    """Layers by which a worker reads its 1/N ahead, with "hybrid"."""
    host_store: OutputFolder | None = None
    """Folder for the expert file of "streamed" and "hybrid", made where the checkpoint stores
    experts otherwise than they are computed with. null: in the system's temporary files."""
    packed_experts: bool = True
    """Whether experts move as the processor computes with them. false: as matrices, where the
    processors of the workers differ."""
    disable_kv_cache: bool = False
    """Whether workers go without a KV pool and a prefix cache: then only prompts of one batch share
    their prefixes."""
    max_batch_tokens: Count = 4096
    """Tokens of a batch at most, on prefill workers."""
    max_batch_sequences: Count = 256
    """Sequences of a batch at most, on prefill workers."""
    saturation: Count | None = None
    """FLOPs of work at which a worker counts as saturated. null: calibrated from what it
    measures."""
    saturation_margin: Annotated[float, Meta(ge=0, le=10)] = 0.1
    """Gamma of Eq. 1: by which fraction the calibrated threshold lies above what hides all
    transfers."""
    engine: Literal["torch", "stub"] = "torch"
    """ "stub" answers without computing: to measure everything around the engine."""


class ScalingConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """More prefill workers while those that there are are full, and fewer again: from
    groups.prefill_ranks up to max_prefill_ranks. A worker's fill is the work of its open requests
    over its saturation threshold (prefill.saturation)."""

    max_prefill_ranks: Count | None = None
    """Workers at most. null: always groups.prefill_ranks. Only where a worker has all experts by
    itself: prefill.experts=resident, streamed or cached."""
    scale_up_utilization: Annotated[float, Meta(gt=0, le=100)] = 0.8
    """Mean fill from which on another worker is started."""
    scale_down_utilization: Annotated[float, Meta(ge=0, le=100)] = 0.4
    """Mean fill below which the others would have to stay for one worker to be ended. Below
    up_fill."""
    look_back_period_s: Seconds = 5.0
    """Seconds over which the mean goes, and which nothing is decided for after a change."""
    downscale_delay_s: Seconds = 60.0
    """Seconds for which a worker must have been one too many before it is ended: it answers what it
    has, and goes."""

    def __post_init__(self) -> None:
        if self.scale_down_utilization >= self.scale_up_utilization:
            raise ValueError(
                f"scaling.scale_down_utilization={self.scale_down_utilization:g} is not below "
                f"scale_up_utilization={self.scale_up_utilization:g}: workers would start and "
                "stop at the same load"
            )


class ExpertsConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts that do not all fit into memory: on expert ranks where `slots` or `bytes` is given,
    and on prefill workers with prefill.experts=cached."""

    slots: Count | None = None
    """Experts that a worker keeps, of all layers together. null: as `bytes` says."""
    bytes: Count | None = None
    """Bytes of experts that a worker keeps. null: as `slots` says; with neither an expert rank
    keeps all of its own."""
    storage_format: bool = False
    """Whether they are kept and read as the checkpoint stores them (fp8, MXFP4, bfloat16), and made
    ready at each use: more of them fit, and each use costs more. `bytes` counts them so. The same
    answers."""
    eviction_policy: Literal["walk", "lru", "lfu", "pinned"] = "walk"
    """Which expert leaves first. "walk": of the layer that comes again last, the least recently
    used. "lru": the least recently used of all. "lfu": the least often used, of late. "pinned": LRU
    in one slot of four; the others keep what the profile says is used most."""
    predictor: Literal["none", "router", "fitted", "quasi", "estimator"] | None = None
    """By what the experts of the next layer are foretold, to be read ahead. "router": its router on
    this layer's state. "fitted": by least squares. "quasi": its router, with what this layer's
    experts give on average. "estimator": by a small network. null: at each layer what the profile
    says is best; without one, "router"."""
    hint_again: bool = False
    """Whether that is foretold once more, and better, when this layer's experts have been added:
    for experts that take long to read beside a layer's compute."""
    speculative: Literal["exact", "speculated"] = "exact"
    """"speculated": a token that is generated is computed with the experts that were foretold, not
    with those that its router chooses: another model, told in /v1/models. Prompts stay exact."""
    speculative_layers: tuple[int, ...] | None = None
    """Layers where that is so. null: all that another layer with experts comes before."""
    speculative_weights: Literal["router", "predicted"] = "router"
    """Weights of those experts. "router": what the layer's router gives them. "predicted": as they
    were foretold, too (the paper's way)."""
    profile: InputPath | None = None
    """A file of `tandem profile --routing`. null: routing.safetensors beside the checkpoint, if it
    is there, as with the bundled model."""
    direct_io: bool | None = None
    """Whether experts are read past the page cache. null: where their file is larger than free
    memory."""

    @property
    def is_bounded(self) -> bool:
        """Whether it says how many experts are kept."""
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


class PlacementConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which expert rank holds which experts, how often, and whether that follows the traffic."""

    file: InputPath | None = None
    """A file of `tandem place`, for the expert ranks (prefill workers of "all_to_all" where there
    are none). null: experts in order, each once."""
    spare_slots: NonNegative = 0
    """Slots that each expert rank has per layer beyond its share, for replicas, where experts
    follow the traffic. With `file` its own number counts."""
    rebalance: Literal["off", "once", "continuous"] = "off"
    """Whether experts move to where the traffic wants them: never, once when enough has been seen,
    or again and again."""
    move_timeout_s: Seconds = 60.0
    """Seconds that a move may take; then it is given up, and the old placement serves on."""
    max_move_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    """Bytes of experts that a rank brings in at most for one move: so much more memory it needs
    meanwhile. A larger change is made in several."""
    bytes_per_s: Annotated[float, Meta(gt=0)] = 100e6
    """Bytes a second at which a rank brings experts in, beside its work."""
    payback_s: Seconds = 60.0
    """Seconds of such traffic within which a move must have saved what it costs."""
    sample_tokens: Count = 256
    """Tokens a second of each attention rank whose experts are noted."""
    record: OutputFolder | None = None
    """Folder in which the planner writes a routing profile, routing.safetensors, of what was noted:
    once a minute, and at the end. null: nowhere."""


class PlannerConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The planner that chooses a plan for every batch. Where it has none, `schedule` rules."""

    enabled: bool = True
    """Whether there is a planner. false: the section `schedule` rules."""
    hardware: InputPath | None = None
    """A file of `tandem profile`, or the name of one in the package. null: learned from what the
    ranks measure."""
    refit: bool = True
    """Whether the file's figures follow what the ranks measure. false needs a hardware file."""
    extended_search: bool = True
    """Whether plans are considered that FinDEP's search space lacks."""
    answer_timeout_s: Seconds = 1.0
    """Seconds after which a rank that waits for an answer says so, and asks no more until it
    comes."""
    report_interval_s: Annotated[float, Meta(ge=0, le=3600)] = 0.1
    """Seconds between two batches of a rank that are measured for the planner. 0: every batch."""

    def __post_init__(self) -> None:
        if self.hardware is None and not self.refit:
            raise ValueError(
                "planner.refit=false without planner.hardware: nothing tells how long stages take; "
                "name a hardware file, or set planner.enabled=false"
            )


class ServeConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The application on its Ray cluster."""

    name: str = "tandem"
    """Of this application on its Ray cluster, where others of other names and ports may run: 1 to
    40 of a-z, 0-9 and -, of which - is neither first nor last."""

    def __post_init__(self) -> None:
        if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", self.name) is None:
            raise ValueError(
                f"name={self.name!r}: use 1 to 40 of a-z, 0-9 and -, of which - is neither first "
                "nor last"
            )


class HttpConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server: who may use it, and what a client may cost before and beside its request."""

    front: Literal["direct", "serve"] = "direct"
    """ "direct": the ingress listens on host:port itself, so that a streamed token costs no Ray
    call. "serve": through Ray Serve's proxy (`serve run`), which has its own host and port."""
    host: str = "127.0.0.1"
    """Address to listen on, with front "direct"."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port to listen on, with front "direct". `tandem serve` refuses 0: clients must know it."""
    max_body_bytes: Count = 8 << 20
    """Bytes of a request's body at most; over it 413."""
    max_batch_items: Count = 4096
    """Texts of a classification, or sequences of a completion, that one request may ask for."""
    request_timeout_s: Seconds = 600.0
    """Seconds that a request may take in all; over it 504."""
    api_keys: list[str | ApiKey] = []
    """Bearer tokens, one of which every request for the model must carry. Empty: open to all. In
    place of a token {key: TOKEN, priority: be, tenant: NAME} may stand: the class of its requests
    that name none (ls unless said), and with which other tokens it takes its turns (none). Also
    fixed_priority: true, to let them name no other class, and its limits: requests_per_s and
    tokens_per_s, in the long run, and concurrency, requests at a time."""
    keys_file: InputPath | None = None
    """YAML or JSON file of api_keys and, if wanted, metrics_key, in place of api_keys here: read
    again while the server runs, so that what changes in it counts within seconds. One that cannot
    be used changes nothing: the keys before it stay."""
    allow_public: bool = False
    """Whether a server without keys may listen where others than this machine reach it."""
    metrics_key: str | None = None
    """The bearer token of /metrics, /load, /status, /trace and of exporters. null: these are open
    to all. One in keys_file goes before it, at exporters where that file is."""
    operator_key: str | None = None
    """The bearer token of /scale (`tandem scale`). null: with front "direct" on 127.0.0.1 and
    without keys it is open to whoever is on this machine, else to nobody."""
    tls_certificate: InputPath | None = None
    """PEM file, together with tls_key. null: plain HTTP."""
    tls_key: InputPath | None = None
    """PEM file, together with tls_certificate."""
    root_path: str = ""
    """The prefix that a proxy in front takes off, such as /llm."""
    access_log: bool = True
    """Whether there is a line for each request (logger tandem.access), never with its text."""
    max_header_bytes: Annotated[int, Meta(ge=256, le=1 << 20)] = 16 << 10
    """Bytes of request line and headers, or of the trailers of a body."""
    max_headers: Count = 100
    """Headers of a request, or trailers of its body."""
    max_connections: Count | None = None
    """Connections at a time. null: what the descriptor limit allows, up to 8192. At the cap the
    oldest connection that has not yet sent a valid key (a complete request, where no keys are
    configured) makes room, then the one that has been idle longest; where all are at work a new one
    is refused."""
    max_connections_per_address: Count | None = None
    """Connections at a time from one address, for servers that no proxy stands in front of. null:
    no such bound."""
    header_timeout_s: Seconds = 10.0
    """Seconds from accepting a connection, or from the first byte of a further request, to the end
    of its headers."""
    keep_alive_timeout_s: Seconds = 75.0
    """Seconds for which a connection may be idle between requests."""
    body_timeout_s: Seconds = 60.0
    """Seconds from the end of the headers to the end of the body, however it trickles in (also with
    front "serve")."""
    write_timeout_s: Seconds = 60.0
    """Seconds over which a client may read less than 1 KiB/s of its answer before it is cut off."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86400)] = 20.0
    """Seconds for which `tandem serve` that is told to end (SIGTERM, Ctrl-C) goes on answering the
    requests that it has; new ones get 503. A second signal ends it at once. Behind `serve deploy`
    the same when the application is removed or deployed anew."""

    @property
    def clients(self) -> list[ApiKey]:
        """`api_keys`, each with its class and tenant."""
        return [api_key(each) for each in self.api_keys]

    @property
    def has_keys(self) -> bool:
        """Whether a request must carry one."""
        return bool(self.api_keys) or self.keys_file is not None

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
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
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII):
            raise ValueError(
                f"root_path={self.root_path!r}: give a path such as /llm, without a slash at the "
                "end"
            )


class LimitsConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may become, and what all open ones of an ingress may hold together. More is
    refused before it is made: 413, or 429 where only others leave too little."""

    passes: Count = 65_536
    """Sequences that a request becomes: rows x passes of their labels, prompts x n."""
    pass_tokens: Count = 1 << 25
    """Tokens of all these sequences, those to generate included. A prompt is bounded by the model
    as well: no more characters than a context of its longest tokens."""
    label_tokens: Count = 65_536
    """Tokens of all labels of a classification."""
    answer_bytes: Annotated[int, Meta(ge=1 << 10, le=128 << 20)] = 64 << 20
    """Bytes of an answer as JSON, as estimated; log-probabilities are most of it."""
    open_bytes: Annotated[int, Meta(ge=1 << 20)] = 512 << 20
    """Bytes held by all open requests: bodies as they come in, texts, tokens, scores, answers."""
    request_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Of open_bytes, what one request may hold at most."""
    tokenizing_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    """Threads in which long texts are tokenised in pieces; requests take turns."""

    @property
    def request_bytes(self) -> int:
        """What one request may hold."""
        return int(self.open_bytes * self.request_fraction)


class LogConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is logged, and where to."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """From which on events are written."""
    format: Literal["text", "json"] = "text"
    """ "text": a line of key=value for people and machines. "json": an object a line."""
    prompts: bool = False
    """Whether what clients send may be logged: each request's body (logger tandem.prompts), and
    messages of errors that may quote it. false: never a word of it."""
    stall_threshold_s: Seconds = 10.0
    """Seconds for which a loop of a process may be in one step before the stacks of its threads are
    logged (`event_loop_blocked`), once each time."""
    folder: OutputFolder | None = None
    """Where each run gets a folder. null: with `tandem serve` $XDG_STATE_HOME/tandem/NAME,
    elsewhere standard error only."""
    runs: Count = 10
    """Folders of runs that are kept."""
    max_file_bytes: Annotated[int, Meta(ge=1 << 16)] = 64 << 20
    """Bytes of a file, which then begins anew, with one older part beside it."""


class MetricsConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a Prometheus finds each process's own metrics (docs/monitoring.md)."""

    exporters: bool = True
    """Whether every rank, planner, ingress, launcher and bulk job listens for scrapes on a free
    port of its own, with http.metrics_key if there is one. /metrics is there without them, too."""
    host: str | None = None
    """Address on which they listen. null: 127.0.0.1, or where a Ray cluster has several nodes the
    address of each one's."""
    targets: OutputFolder | None = None
    """Folder, on the node of the launcher, for the file that lists them to a Prometheus
    (NAME_service_discovery.json). null: that of Ray's own, in the cluster's session folder; of a
    cluster that Tandem starts, /tmp/tandem-metrics."""


class TraceConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The timeline that a rank keeps of its tasks."""

    spans: NonNegative = 20_000
    """Task spans that each rank keeps, the latest ones. 0 switches recording off."""


class TandemConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    trace: TraceConfig = TraceConfig()

    def __post_init__(self) -> None:
        if self.prefill.experts == "cached" and not self.experts.is_bounded:
            raise ValueError(
                "prefill.experts=cached: say how many experts a worker keeps, of all layers "
                "together: experts.slots, or experts.bytes"
            )
        self._check_scaling()

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
        """Prefill workers that there may be."""
        return self.scaling.max_prefill_ranks or self.groups.prefill_ranks
