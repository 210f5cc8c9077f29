"""An attention rank: a serving worker whose experts are on other ranks, joined by channels."""

from __future__ import annotations

from actors.batching.scheduled_batch import ScheduledBatch
from actors.channels.factory import rank_endpoint
from actors.engine.executor import Executor, ExecutorParts
from actors.experts.remote_plane import RemotePlane
from actors.planning.rank_planning import RankPlanning
from actors.ranks.serving_worker import NOBODY, ServingWorker
from actors.telemetry.rank_metrics import channel_bytes
from actors.wire.client_server import FromClient
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, NotFiniteError
from contracts.events import TaskSpan
from contracts.messages import Submit
from contracts.plan import Plan
from contracts.requests import Sampling
from contracts.worker import Group, rank_name
from models.spec.model import ModelSpec
from models.weights.layout import attention_parameters
from planner.placement.slots import ExpertPlacement, check_fits

WARM_UP_IDS = list(range(64))  # enough for two micro-batches, and for many experts
WARM_UP = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)


class AttentionWorker(ServingWorker):
    """Channels, their heartbeats and the planner's link have threads of their own."""

    _executor: Executor

    def _open(self) -> None:
        spec, half = self.spec, self._half
        check_fits(spec.placement, spec.expert_ranks, half.spec.num_experts, half.spec.moe_layers)
        chunk_cost = ChunkCost(half.spec)
        self._upcoming_changed = False
        self._planning = RankPlanning(
            spec, chunk_cost=chunk_cost, clock=monotonic_s, telemetry=self._metrics
        )
        self._endpoint = rank_endpoint(spec, half.device, monotonic_s)
        plane = RemotePlane(
            self._endpoint,
            ExpertPlacement(spec.placement),
            [rank_name(Group.EXPERT, rank) for rank in range(spec.expert_ranks)],
            self._timeline,
            monotonic_s,
            reply_s=spec.config.channel.reply_s,
        )
        self._metrics.follow(self._timeline, self._endpoint.bytes_moved)
        self._sections |= {
            "channel_bytes": lambda: channel_bytes(self._endpoint.bytes_moved()),
            "plans": lambda: self._planning.batches,
            "chosen_by": lambda: self._planning.chosen,
        }
        self._notes["planner"] = lambda: self._planning.state
        parts = ExecutorParts(
            name=spec.name,
            half=half,
            kv=self._kv,
            plane=plane,
            sink=self._finisher,
            timeline=self._timeline,
            clock=monotonic_s,
        )
        self._executor = Executor(parts, chunk_cost=chunk_cost)

    def _wake(self) -> None:
        self._executor.wake()

    def _close(self) -> None:
        try:
            self._planning.close()
        finally:
            self._endpoint.close()

    def connect(self, addresses: dict[str, str]) -> None:
        """Joins the expert ranks: name -> channel address."""
        for peer, address in addresses.items():
            try:
                self._endpoint.connect(peer, address)
            except ChannelError as error:  # says what happened, but not always to whom
                message = f"cannot join {peer}: {error.message}"
                raise type(error)(message, *error.args[1:]) from None

    def pin_plan(self, plan: Plan | None) -> None:
        """Batches formed from now on run under `plan` (None: under one chosen for each)."""
        self._planning.pin(plan)

    def join_planner(self, address: str) -> None:
        """Asks the planner there for the plans of batches from now on."""
        self._planning.join(address)

    def _observe(self, span: TaskSpan) -> None:
        super()._observe(span)
        self._planning.observe(span)

    def _warm_up(self) -> None:
        """The first batch is our own, answered to nobody: it takes several times as long."""
        self._admit(NOBODY, Submit(request_id=0, token_ids=WARM_UP_IDS, sampling=WARM_UP))

    def _take(self, received: FromClient) -> None:
        super()._take(received)
        self._upcoming_changed = True

    def _submit(self, batch: ScheduledBatch) -> None:
        self._executor.submit(batch, self._planning.choose(batch))
        self._upcoming_changed = True

    def _completed(self, batch: ScheduledBatch) -> None:
        for chunk in batch.chunks:
            sequence = chunk.sequence
            if sequence.key[0] == NOBODY and isinstance(sequence.failure, NotFiniteError):
                raise self._unusable()
        self._planning.finished(batch)

    def _after_step(self) -> None:
        if self._upcoming_changed and self._executor.in_flight:  # experts have work meanwhile
            self._upcoming_changed = False
            if self._planning.looks_ahead:
                self._planning.look_ahead(self._scheduler.upcoming())


class ChunkCost:
    """Relative attention cost of new tokens [start, stop) of a sequence: projections of each token,
    plus scores and weighted values over its context (FinDEP Eq. 1, for grouped-query attention)."""

    def __init__(self, model: ModelSpec) -> None:
        attended_flops = 4 * model.num_heads * model.head_dim
        linear_flops = 2 * attention_parameters(model)
        self._linear_tokens = linear_flops / attended_flops  # in units of one attended token

    def __call__(self, start: int, stop: int) -> float:
        return (stop - start) * (self._linear_tokens + (start + stop) / 2)
