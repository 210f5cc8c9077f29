"""Plans for batches on request: cached by shape, on stage models that follow measured times.

    PlanRequest   -> bucket -> known under the current models?  -> PlanAnswer
                                   └─ no: plan_batch ────────────────┘
    BatchReport, ExpertReport -> models -> changed by more than DRIFT? -> plans are dropped

With a hardware file there are two sets of stage models, the file's and the refitted ones;
`ModelSelector` chooses. Owned by one thread; the caller has the clock.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from contracts.plan import Plan
from contracts.planner_messages import TRIAL_REPORTS, BatchReport, ExpertReport
from planner.costs.fit import OnlineLinear
from planner.costs.model_shape import Chunks, count_tokens
from planner.costs.routing_shape import Spread
from planner.costs.stages import FREE, Linear, PlanSpec
from planner.online.capacity import GroupSetup, TrafficMix, fullest_tokens, other_sizes
from planner.online.models import OnlineModels, OnlineSetup
from planner.online.stages import SizedStage
from planner.schedule.batch_plan import (
    BatchBucket,
    bucket_of,
    planned_batch,
    replayed_ms,
    uncut_batch,
)
from planner.schedule.solver import PlannedBatch

DRIFT = 0.15  # relative change of a stage at a reference size that starts a new version
REPORTS_BETWEEN = 32  # least number of reports between versions
MAX_SHAPES = 1024
_NEGLIGIBLE = 0.05  # drift of a stage, in all stages together, that is ignored
_REFERENCE_TOKENS = (16, 128, 1024)
_TYPICAL_SEQUENCES = 8.0
_EVEN = 1.0  # ms; typical x of the line from predicted to measured makespans


class NoPlanError(Exception):
    """Reason for the lack of a plan, as a sentence."""


class OnlinePlanner:
    """Plans batches; `version` grows when the stage models have changed enough to plan again."""

    def __init__(self, setup: OnlineSetup) -> None:
        """Create a planner. Raises ConfigError if the hardware file lacks figures for the split."""
        self.version = 1
        self._setup = setup
        self._reset(setup)

    def resize(self, attention_ranks: int, expert_ranks: int) -> None:
        """Set the numbers of ranks, keeping valid measurements (`OnlineModels.carry_over`).

        Raises ConfigError like the constructor, without a change.
        """
        self._reset(
            self._setup._replace(attention_ranks=attention_ranks, expert_ranks=expert_ranks),
            self._model_views,
            self._selector.selected,
        )
        self.version += 1

    def reset_models(self, attention_ranks: int, expert_ranks: int) -> None:
        """Resize without the hardware file."""
        self._setup = self._setup._replace(hardware=None)
        self.resize(attention_ranks, expert_ranks)

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of attention and expert ranks."""
        return self._setup.attention_ranks, self._setup.expert_ranks

    def _reset(
        self, setup: OnlineSetup, before: Sequence[_ModelView] = (), selected: int = 0
    ) -> None:
        """Create the models; before: views of a group of another size, the last one refitted."""
        following = OnlineModels(setup)
        if before and setup.refit:
            following.carry_over(before[-1].models)
        views = [_ModelView(following, _identity())]
        if setup.hardware is not None:
            file = OnlineModels(setup)
            views = [_ModelView(file, None), _ModelView(file, _identity()), *views]
        self._setup, self._following = setup, following
        self._selector = ModelSelector(len(views))
        if len(before) == len(views):
            views = [new._replace(line=old.line) for new, old in zip(views, before, strict=True)]
            self._selector.selected = selected
        self._model_views = views
        self._known: OrderedDict[BatchBucket, PlannedBatch] = OrderedDict()
        self._reference = _reference_times(self._models)
        self._reports = 0
        self._solo_line = _identity()
        self._between = SizedStage(None, _TYPICAL_SEQUENCES)
        self._trials = SplitTrials()

    @property
    def _view(self) -> _ModelView:
        return self._model_views[self._selector.selected]

    @property
    def _models(self) -> OnlineModels:
        return self._view.models

    def known(self, batch: Chunks) -> PlannedBatch | None:
        """Return the known plan of a batch of this shape, if any."""
        bucket = bucket_of(batch)
        planned = self._known.get(bucket)
        if planned is not None:
            self._known.move_to_end(bucket)
        return planned

    def plan(self, batch: Chunks) -> PlannedBatch:
        """Return the best plan of `batch` (new tokens per sequence). Raises NoPlanError."""
        tokens, most = count_tokens(batch), self._models.most_tokens()
        spec = self._models.spec(tokens)
        if spec is None:
            stages = ", ".join(self._models.cold_stages)
            raise NoPlanError(f"too few measured times yet of: {stages}")
        if tokens > most:
            raise NoPlanError(f"{tokens} tokens: none above {most:g} can be predicted yet")
        bucket = bucket_of(batch)
        try:
            planned = self._planned(spec, batch, is_cut=self._trials.splits(bucket))
            if self._trials.lacks_other(bucket):
                other = self._planned(spec, batch, is_cut=not self._trials.splits(bucket))
                if (other.plan.r1 > 1) != (planned.plan.r1 > 1):
                    planned = msgspec.structs.replace(planned, trial=other.plan)
        except ValueError as error:
            raise NoPlanError(str(error)) from None
        self._known[bucket] = planned
        while len(self._known) > MAX_SHAPES:
            self._known.popitem(last=False)
        return planned

    def _planned(self, spec: PlanSpec, batch: Chunks, *, is_cut: bool) -> PlannedBatch:
        chunk_ms = self._models.chunk_time()
        if is_cut:
            return planned_batch(spec, batch, chunk_ms, beyond=self._setup.beyond)
        return uncut_batch(spec, batch, chunk_ms)

    def predict_ms(self, plan: Plan, micro_batches: Sequence[Chunks]) -> float | None:
        """Return the expected makespan on these micro-batches; None while a stage is cold.

        It includes costs that have no stage model (logits, sampling).
        """
        replayed_ms = _replayed_ms(self._models, plan, micro_batches)
        return None if replayed_ms is None else self._view.expected_ms(replayed_ms)

    def observe_batch(self, report: BatchReport) -> None:
        """Add an attention rank's measurement."""
        if not self._setup.refit:
            return
        batches = [times.batch for times in report.micro_batches]
        replayed = [_replayed_ms(view.models, report.plan, batches) for view in self._model_views]
        known = [ms for ms in replayed if ms is not None]
        if len(known) == len(self._model_views):
            expected = [v.expected_ms(ms) for v, ms in zip(self._model_views, known, strict=True)]
            self._selector.add(expected, report.measured_ms)
            for view, ms in zip(self._model_views, known, strict=True):
                view.update_line(ms, report.measured_ms)
        self._following.add_batch(report)
        bucket = bucket_of(list(itertools.chain.from_iterable(batches)))
        if self._trials.add(bucket, len(batches) > 1, report.measured_ms):
            self._plan_again()
        self._count_report()

    def observe_experts(self, report: ExpertReport) -> None:
        """Add an expert rank's measurement."""
        if self._setup.refit:
            self._following.add_experts(report)
            self._count_report()

    def spread_over(self, spread: Spread) -> None:
        """Set how tokens spread over the expert ranks, after a move or a change of traffic."""
        for view in self._model_views:
            view.models.spread_over(spread)
        self._check_drift(least_reports=0)

    def unit_ms(self) -> tuple[float, float] | None:
        """Return `OnlineModels.unit_ms` of the selected models."""
        return self._models.unit_ms()

    def group(self, mix: TrafficMix) -> GroupSetup:
        """Return the group for `capacity` of that mix, by the selected models."""
        ag, eg, models = self._setup.attention_ranks, self._setup.expert_ranks, self._models
        tokens = fullest_tokens(mix, self._setup.max_batch_tokens)
        specs = {
            ranks: models.spec_of(*ranks, tokens) for ranks in [(ag, eg), *other_sizes(ag, eg)]
        }
        known = {ranks: spec for ranks, spec in specs.items() if spec is not None}
        chunks = {expert_ranks: models.chunk_time(expert_ranks) for _, expert_ranks in known}
        line, between = self._solo_line.model, self._between.model or FREE
        return GroupSetup(
            ag,
            eg,
            known,
            chunks,
            lambda ms, sequences: max(0.0, line.at(ms)) + between.at(sequences),
        )

    def observe_solo_batch(self, report: BatchReport) -> None:
        """Add a batch that ran while other ranks left the experts idle.

        `group` learns logits, sampling and the gap between batches from it. Other batches include
        delays by other ranks, which the models of a full group already have.
        """
        batches = [times.batch for times in report.micro_batches]
        spec = self._models.spec_of(1, self._setup.expert_ranks, _tokens(batches))
        alone_ms = _replayed_ms(self._models, report.plan, batches, spec)
        if alone_ms is not None:
            self._solo_line.update(alone_ms, report.measured_ms)
        if report.between_ms > 0:
            self._between.add(sum(map(len, batches)), report.between_ms)

    def _count_report(self) -> None:
        self._reports += 1
        self._check_drift(least_reports=REPORTS_BETWEEN)

    def _check_drift(self, *, least_reports: int) -> None:
        if self._reference and self._reports < least_reports:
            return
        times = _reference_times(self._models)
        if (times and not self._reference) or _drifted(self._reference, times):
            self._reports = 0
            self._reference = times
            self._plan_again()

    def _plan_again(self) -> None:
        self.version += 1
        self._known.clear()


class _ModelView(NamedTuple):
    """Stage models, and the line from their makespans to measured ones (None: identity)."""

    models: OnlineModels
    line: OnlineLinear | None

    def expected_ms(self, replayed_ms: float) -> float:
        return replayed_ms if self.line is None else max(0.0, self.line.model.at(replayed_ms))

    def update_line(self, replayed_ms: float, measured_ms: float) -> None:
        if self.line is not None:
            self.line.update(replayed_ms, measured_ms)


def _identity() -> OnlineLinear:
    return OnlineLinear(Linear(0.0, 1.0), _EVEN)


def _replayed_ms(
    models: OnlineModels, plan: Plan, micro_batches: Sequence[Chunks], spec: PlanSpec | None = None
) -> float | None:
    """Return the makespan on these micro-batches; None while a stage is cold."""
    spec = spec or models.spec(_tokens(micro_batches))
    if spec is None:
        return None
    return replayed_ms(spec, models.chunk_time(), plan, micro_batches)


def _tokens(micro_batches: Sequence[Chunks]) -> int:
    return sum(map(count_tokens, micro_batches))


def _reference_times(models: OnlineModels) -> list[list[float]]:
    """Return the ms of each stage at each reference size; [] while one is cold."""
    chunk_ms = models.chunk_time()
    specs = [(tokens, models.spec(tokens)) for tokens in _REFERENCE_TOKENS]
    return [_stage_times(spec, tokens, chunk_ms(0, tokens)) for tokens, spec in specs if spec]


def _stage_times(spec: PlanSpec, tokens: int, chunk_ms: float) -> list[float]:
    me, stages = spec.me(tokens, 1), spec.stages
    links = (stages.expert.at(me), stages.a2e.at(me), stages.e2a.at(me))
    return [stages.attention.alpha_ms + chunk_ms, spec.shared.at(tokens), *links]


def _drifted(before: Sequence[Sequence[float]], now: Sequence[Sequence[float]]) -> bool:
    return any(
        not math.isclose(was, new, rel_tol=DRIFT, abs_tol=_NEGLIGIBLE * sum(then))
        for then, at in zip(before, now, strict=False)
        for was, new in zip(then, at, strict=True)
    )


TRIAL_BATCHES = 16  # batches that are compared
LEAST_GAIN = 0.2  # of the selected one's median relative error
LEAST_WINS = 12  # of TRIAL_BATCHES: by chance in 4 of 100 trials
LEAST_DIFFERENCE = 0.005  # of the measured time; smaller differences are ignored


class ModelSelector:
    """Selects the contender that predicts best; `selected` is its index."""

    def __init__(self, contenders: int) -> None:
        self.selected = 0
        self._errors = [deque[float](maxlen=TRIAL_BATCHES) for _ in range(contenders)]

    def add(self, predicted_ms: Sequence[float], measured_ms: float) -> None:
        """Add each contender's prediction of a batch; measured_ms is above 0."""
        for errors, predicted_one_ms in zip(self._errors, predicted_ms, strict=True):
            errors.append(abs(predicted_one_ms - measured_ms) / measured_ms)
        if len(self._errors[0]) < TRIAL_BATCHES:
            return
        medians = [statistics.median(errors) for errors in self._errors]
        best = min(range(len(medians)), key=medians.__getitem__)
        selected_median, errors = medians[self.selected], self._errors[self.selected]
        better_count = sum(
            challenger_error < selected_error
            for challenger_error, selected_error in zip(self._errors[best], errors, strict=True)
        )
        gain = selected_median - medians[best]
        if better_count >= LEAST_WINS and gain > max(
            LEAST_DIFFERENCE, LEAST_GAIN * selected_median
        ):
            self.selected = best
            for errors in self._errors:
                errors.clear()


LEAST_SPLIT_GAIN = 0.05  # of the slower median; smaller differences change nothing
REPEAT_REPORTS = 1024  # then the other way is measured again


class SplitTrials:
    """Choice between split and unsplit decode batches by measured times.

    Stage models lack two costs of a split decode batch: its micro-batches compete for cores that
    both groups use, and only an unsplit batch runs whole layers in compiled calls.

    A trial runs TRIAL_REPORTS batches in the other way, and every one of them is reported. Batches
    before, between and after them run in the selected way. Trials are by number of sequences.
    """

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def splits(self, bucket: BatchBucket) -> bool:
        """Return whether a plan may split a batch; always, if it has prompts."""
        trial = self._trials.get(bucket.decode_rows)
        return bucket.prompts > 0 or trial is None or trial.splits

    def lacks_other(self, bucket: BatchBucket) -> bool:
        """Return whether batches of this size should be measured in the other way too."""
        trial = self._trials.get(bucket.decode_rows)
        return bucket.prompts == 0 and trial is not None and trial.lacks_other

    def add(self, bucket: BatchBucket, is_split: bool, ms: float) -> bool:
        """Add a batch's measured time; return whether plans of its size change."""
        if bucket.prompts:
            return False
        return self._trials.setdefault(bucket.decode_rows, _Trial()).add(is_split, ms)


class _Trial:
    """Latest times of split and of unsplit batches."""

    def __init__(self) -> None:
        self.splits = True
        self._times_ms = {way: deque[float](maxlen=TRIAL_REPORTS) for way in (True, False)}
        self._added = 0

    @property
    def lacks_other(self) -> bool:
        return self._is_known(self.splits) and not self._is_known(not self.splits)

    def _is_known(self, way: bool) -> bool:
        return len(self._times_ms[way]) == TRIAL_REPORTS

    def add(self, is_split: bool, ms: float) -> bool:
        before, lacked, times_ms = self.splits, self.lacks_other, self._times_ms
        times_ms[is_split].append(ms)
        self._added += 1
        if self._added % REPEAT_REPORTS == 0:
            times_ms[not before].clear()
        if self._is_known(True) and self._is_known(False):
            now_ms, other_ms = (statistics.median(times_ms[way]) for way in (before, not before))
            if other_ms < (1 - LEAST_SPLIT_GAIN) * now_ms:
                self.splits = not before
        return (self.splits, self.lacks_other) != (before, lacked)
