"""The one configuration: frozen structs, decoded once by `load_config`, passed by value.

Bounds are checked by msgspec on decoding; rules across fields stand in `__post_init__`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

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
MAX_KEY_CHARACTERS = 200  # of an API key: must fit into the smallest max_header_bytes


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ModelConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """path: a Hugging Face folder, or "bundled". name: what clients call it (default: folder)."""

    path: InputPath = BUNDLED
    name: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    max_context_tokens: Count | None = None  # None: what the checkpoint states

    def context_tokens(self, stated: int) -> int:
        """The longest sequence that is served of a checkpoint that states so many tokens."""
        return min(stated, self.max_context_tokens or stated)


class GroupsConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and placement of the attention and expert groups, and of the prefill workers. Either
    pipeline may be left out (0 ranks): the other one then does its work too.

    placement "pack" puts ranks on as few nodes as fit; "spread" puts the attention group and the
    expert group on different nodes. device "auto" takes GPUs where the Ray cluster has them.
    resources_*: extra Ray resources that each rank of the group asks for. give_up_s: how long a
    rank of the attention/expert group, which is not replaced, may be of no use before the server
    ends (`tandem serve`, exit status 3) or is started again (`serve run`).
    """

    attention_ranks: NonNegative = 1
    expert_ranks: NonNegative = 1
    prefill_ranks: NonNegative = 0
    placement: Literal["pack", "spread"] = "pack"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpus_per_rank: Annotated[float, Meta(ge=0)] = 0.25
    torch_threads: Count = 1
    attention_resources: dict[str, float] = {}
    expert_resources: dict[str, float] = {}
    prefill_resources: dict[str, float] = {}
    address: str | None = None  # Ray address; None: RAY_ADDRESS if set, else a local cluster
    ready_timeout_s: Seconds = 180.0
    give_up_s: Seconds = 10.0

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
    """backend "auto" follows placement: nccl between GPUs, ipc on one GPU, shm on one node, tcp.

    A peer that is silent for silence_s (its heartbeat comes every heartbeat_s) counts as hung; over
    shm after four times as long, unless its process is stopped. A rank whose loop is in one step (a
    layer, or less) for stuck_s ends its heartbeats. An expert rank that goes on beating, but has
    answered nothing of an attention rank for reply_s, is lost to it.
    deadline_s bounds connecting, handshakes and a blocked send. For spin_s after a payload a
    waiting rank looks again and again instead of sleeping: to wake a core costs more than a short
    wait (None: SPIN_S where a node has a core for each rank, else 0).
    """

    backend: Literal["auto", "shm", "tcp", "nccl", "ipc"] = "auto"
    heartbeat_s: Seconds = 0.2
    silence_s: Seconds = 1.5
    stuck_s: Seconds = 60.0
    reply_s: Seconds = 300.0
    deadline_s: Seconds = 10.0
    spin_s: Annotated[float, Meta(ge=0, le=1)] | None = None
    segment_bytes: Annotated[int, Meta(ge=4096)] = 8 << 20

    def __post_init__(self) -> None:
        if self.silence_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"silence_s={self.silence_s} must be at least twice heartbeat_s={self.heartbeat_s}"
            )


class KvConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """block_tokens is part of the block hash: all ranks must agree. pool_tokens None: chosen from
    the free memory (memory_fraction of it, shared by the ranks of a node, of both pipelines; a
    GPU's, where each rank has its own). share_partial_blocks
    False: prefixes are shared by whole blocks only. share_between_keys: requests with different
    http.api_keys find each other's prefixes; then `cached_tokens`, and the time of an answer, tell
    a client what others have sent."""

    block_tokens: Count = 16
    pool_tokens: Count | None = None
    memory_fraction: Annotated[float, Meta(gt=0, le=0.9)] = 0.2
    prefix_cache: bool = True
    share_partial_blocks: bool = True
    share_between_keys: bool = False


class ScheduleConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan used where no planner answers (a batch with fewer than min_split_tokens per
    micro-batch is cut into fewer), and the limits of a batch.

    max_waiting: sequences per rank of which nothing has come back yet. request_share: of a batch
    and of those places, what one client request may hold while others are there too (at least one
    sequence of it).
    """

    order: Order = Order.ASAS
    r1: Count = 2
    r2: Count = 1
    min_split_tokens: Count = 32
    max_batch_tokens: Count = 4096
    max_batch_sequences: Count = 256
    max_waiting: Count = 1024
    request_share: Annotated[float, Meta(gt=0, le=1)] = 0.25

    def __post_init__(self) -> None:
        Plan(r1=self.r1, r2=self.r2, order=self.order)  # raises if they do not fit together


class PrefillConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers of the prefill pipeline (groups.prefill_ranks of them).

    experts: where a worker finds the experts of a layer. "resident": all in its memory. "gathered":
    1/N of each layer in its memory, the rest fetched from the other workers behind compute.
    "streamed": read from a host store behind compute. "hybrid": its own 1/N from the host store,
    `shard_window` layers ahead, and from there gathered. "all_to_all": 1/N, and activations travel
    instead of weights, in lockstep (the baseline, DP+EP).
    resident_layers: layers whose experts stay in memory all the same, the first of them included.
    host_store: folder for the expert file of "streamed" and "hybrid", made where the checkpoint
    stores experts otherwise than they are computed with; None: in the system's temporary files.
    packed_experts: experts move as the processor computes with them; false: as matrices, where the
    processors of the workers differ.
    kv_free: no KV pool and no prefix cache; only prompts of one batch share their prefixes.
    saturation: the operator's threshold in FLOPs; None: calibrated. margin: gamma of Eq. 1.
    engine "stub" answers without computing: to measure everything around the engine.
    """

    experts: Literal["resident", "gathered", "streamed", "hybrid", "all_to_all"] = "resident"
    resident_layers: Count = 1
    shard_window: Count = 2
    host_store: OutputFolder | None = None
    packed_experts: bool = True
    kv_free: bool = False
    max_batch_tokens: Count = 4096
    max_batch_sequences: Count = 256
    saturation: Count | None = None
    margin: Annotated[float, Meta(ge=0, le=10)] = 0.1
    engine: Literal["torch", "stub"] = "torch"


class PlannerConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The planner that chooses a plan for every batch. Where it has none, `schedule` rules.

    hardware: a file of `tandem profile`, or the name of one in the package; None: learned from what
    the ranks measure. refit: whether the file's figures follow what they measure. beyond: also
    plans that FinDEP's search space lacks. A rank that waits for an answer for longer than
    answer_deadline_s says so and asks no more until it comes. Of all batches that a rank runs, one
    every report_s is measured for the planner.
    """

    enabled: bool = True
    hardware: InputPath | None = None
    refit: bool = True
    beyond: bool = True
    answer_deadline_s: Seconds = 1.0
    report_s: Annotated[float, Meta(ge=0, le=3600)] = 0.1

    def __post_init__(self) -> None:
        if self.hardware is None and not self.refit:
            raise ValueError(
                "planner.refit=false without planner.hardware: nothing tells how long stages take; "
                "name a hardware file, or set planner.enabled=false"
            )


class ServeConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """name: of this application on its Ray cluster, where others of other names and ports may run;
    up to 40 of a-z, 0-9 and -."""

    name: str = "tandem"

    def __post_init__(self) -> None:
        if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", self.name) is None:
            raise ValueError(
                f"name={self.name!r}: use 1 to 40 of a-z, 0-9 and -, of which - is neither first "
                "nor last"
            )


class HttpConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """front "direct": the ingress listens on host:port itself, so that a streamed token costs no
    Ray call; "serve": through Ray Serve's proxy (`serve run`), which has its own host and port.

    api_keys: bearer tokens, one of which every request for the model must carry; none: open to all.
    metrics_key: the bearer token of /metrics and /load; None: these are open to all.
    tls_certificate, tls_key: PEM files; both or neither. root_path: the prefix that a proxy in
    front takes off. access_log: one line a request (logger tandem.access), never its text.

    What a client may cost before and beside its request, on front "direct":
    max_header_bytes: request line and headers, or the trailers of a body; max_headers: how many.
    max_connections: None: what the descriptor limit allows, up to 8192. At the cap the oldest
    connection that has not yet sent a valid key (a complete request, where no keys are
    configured) makes room, then the one that has been idle longest; where all are at work a new one
    is refused. max_connections_per_address: for servers that no proxy stands in front of.
    header_timeout_s: from accepting a connection, or from the first byte of a further request, to
    the end of its headers. keep_alive_s: idle between requests. body_timeout_s: from the end of the
    headers to the end of the body, however it trickles in (also on front "serve").
    write_timeout_s: a client that reads less than 1 KiB/s of its answer over so long is cut off.
    """

    front: Literal["direct", "serve"] = "direct"
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    max_body_bytes: Count = 8 << 20
    max_batch_items: Count = 4096
    request_timeout_s: Seconds = 600.0
    api_keys: list[str] = []
    metrics_key: str | None = None
    tls_certificate: InputPath | None = None
    tls_key: InputPath | None = None
    root_path: str = ""
    access_log: bool = True
    max_header_bytes: Annotated[int, Meta(ge=256, le=1 << 20)] = 16 << 10
    max_headers: Count = 100
    max_connections: Count | None = None
    max_connections_per_address: Count | None = None
    header_timeout_s: Seconds = 10.0
    keep_alive_s: Seconds = 75.0
    body_timeout_s: Seconds = 60.0
    write_timeout_s: Seconds = 60.0

    def __post_init__(self) -> None:
        _check_keys(self)
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


def _check_keys(http: HttpConfig) -> None:
    """Raises ValueError for a key that would let everybody in, or nobody. Names its place, never
    the key: messages end in logs."""
    for index, key in enumerate(http.api_keys):
        _check_key(f"api_keys[{index}]", key)
        first = http.api_keys.index(key)
        if first < index:
            raise ValueError(f"api_keys[{index}] is the same as api_keys[{first}]: remove one")
    if http.metrics_key is not None:
        _check_key("metrics_key", http.metrics_key)


def _check_key(name: str, key: str) -> None:
    if not key:
        raise ValueError(f"{name} is empty: remove it, or give a key")
    if len(key) > MAX_KEY_CHARACTERS:
        raise ValueError(
            f"{name} has {len(key)} characters, at most {MAX_KEY_CHARACTERS} are accepted"
        )
    wrong = next((at for at, one in enumerate(key) if not "!" <= one <= "~"), None)
    if wrong is not None:
        raise ValueError(
            f"{name}: character {wrong + 1} of {len(key)} is white space, a control character or "
            "not ASCII; no Authorization header can carry that: use visible ASCII characters"
        )


class LimitsConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may become, and what all open ones of an ingress may hold together. More is
    refused before it is made: 413, or 429 where only others leave too little.

    passes: sequences that a request becomes (rows x passes of their labels, prompts x n).
    pass_tokens: tokens of all these sequences, those to generate included. label_tokens: of all
    labels of a classification. answer_bytes: of an answer as JSON, as estimated; log-probabilities
    are most of it. (A prompt is bounded by the model: no more characters than a context of its
    longest tokens.)
    open_bytes: held by all open requests: bodies as they come in, texts, tokens, scores, answers.
    request_fraction: of these, at most what one request may hold.
    tokenizing_threads: long texts are tokenised there in pieces; requests take turns.
    """

    passes: Count = 65_536
    pass_tokens: Count = 1 << 25
    label_tokens: Count = 65_536
    answer_bytes: Annotated[int, Meta(ge=1 << 10, le=128 << 20)] = 64 << 20
    open_bytes: Annotated[int, Meta(ge=1 << 20)] = 512 << 20
    request_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.25
    tokenizing_threads: Annotated[int, Meta(ge=1, le=64)] = 2

    @property
    def request_bytes(self) -> int:
        """What one request may hold."""
        return int(self.open_bytes * self.request_fraction)


class LogConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """level: from which on events are written. folder: of a folder for each run; None: with `tandem
    serve` $XDG_STATE_HOME/tandem/NAME, elsewhere standard error only. runs: how many are kept.
    max_file_bytes: of a file, which then begins anew, with one older part beside it."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    folder: OutputFolder | None = None
    runs: Count = 10
    max_file_bytes: Annotated[int, Meta(ge=1 << 16)] = 64 << 20


class TraceConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """spans: how many task spans each rank keeps (a ring). 0 switches recording off."""

    spans: NonNegative = 20_000


class TandemConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelConfig = ModelConfig()
    groups: GroupsConfig = GroupsConfig()
    channel: ChannelConfig = ChannelConfig()
    kv: KvConfig = KvConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    prefill: PrefillConfig = PrefillConfig()
    planner: PlannerConfig = PlannerConfig()
    serve: ServeConfig = ServeConfig()
    http: HttpConfig = HttpConfig()
    limits: LimitsConfig = LimitsConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = TraceConfig()
