"""Experts that come from host memory or a file, and which are fetched ahead."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_CACHE = "models/experts/expert_cache.py"
_CACHED = ("tests/unit/models/experts/test_expert_cache.py",)
_RANK = "actors/moe/rank_experts.py"
_ON_RANK = ("tests/unit/actors/moe/test_rank_experts.py",)
_SUMS = ("tests/unit/actors/offload/test_cached_backend.py",)
_SLOTS = "models/experts/device_tier.py"
_IN_SLOTS = ("tests/unit/actors/offload/test_device_backend.py",)
_FORESEEN = ("tests/unit/models/prediction/test_expert_predictor.py",)

BUGS: tuple[Bug, ...] = (
    Bug(
        "offloading: what is wanted and there is evicted",
        _CACHE,
        "self._is_wanted(key, priority) or (has_its_part",
        "False or (has_its_part",
        _CACHED,
    ),
    Bug(
        "offloading: a prompt of BE takes what LS uses",
        _CACHE,
        "(has_its_part and key not in self._of_be)",
        "(has_its_part and False)",
        _CACHED,
    ),
    Bug(
        "offloading: what may be wanted of BE is read in place of what LS uses",
        _CACHE,
        "        if priority is Priority.BE and self._is_ls_live():\n            return\n",
        "",
        _CACHED,
    ),
    Bug(
        "offloading: a second hint is read beside the first",
        _CACHE,
        "                if self._hints_under_way():",
        "                if False:",
        _CACHED,
    ),
    Bug(
        "offloading: a slot that was given up is lost",
        _CACHE,
        "        self._free.append(read.slot)\n",
        "",
        _CACHED,
    ),
    Bug(
        "offloading: hints are read before what is wanted",
        _CACHE,
        "if self._hints and not is_missing:",
        "if self._hints:",
        _CACHED,
    ),
    Bug(
        "offloading: several wants are one, and one of them stays",
        _CACHE,
        "        for want in wants:\n            self.drop(want)\n        return merged",
        "        for want in wants[1:]:\n            self.drop(want)\n        return merged",
        _ON_RANK,
    ),
    Bug(
        "offloading: outputs are added as they come",
        "models/experts/cached_sum.py",
        "while (ready_ND := self._came.pop(self._added, None)) is not None:",
        "while (ready_ND := self._came.pop(first, None)) is not None:",
        _SUMS,
    ),
    Bug(
        "offloading: a stored expert is that of another slot",
        "models/experts/expert_format.py",
        "stored = {role: tensor[slot] for",
        "stored = {role: tensor[0] for",
        _SUMS,
    ),
    Bug(
        "offloading: a hint's index is taken for an expert",
        _RANK,
        "Guess(own[index], confidence)",
        "Guess(index, confidence)",
        _ON_RANK,
    ),
    Bug(
        "offloading: a lost rank's experts stay wanted",
        "actors/moe/expert_server.py",
        "                    self._experts.dropped(packet)\n",
        "",
        _ON_RANK,
    ),
    Bug(
        "offloading: what misses experts goes first",
        "planner/scheduling/expert_queues.py",
        "head.missing > 0, not head.begun",
        "head.missing == 0, not head.begun",
        _ON_RANK,
    ),
    Bug(
        "offloading: a slot of a GPU is filled while it is read",
        _SLOTS,
        "return max((mark for mark in marks if mark), key=lambda mark: mark.number, default=None)",
        "return None",
        _IN_SLOTS,
    ),
    Bug(
        "offloading: what is there is overwritten while it is read",
        _SLOTS,
        "self._layer_used[layer] = self._lane.mark()",
        "pass",
        _IN_SLOTS,
    ),
    Bug(
        "offloading: a GPU computes with what has not come",
        _SLOTS,
        "            self._lane.wait(newest)\n",
        "",
        _IN_SLOTS,
    ),
    Bug(
        "offloading: what is on its way to a GPU counts as there",
        _SLOTS,
        "if stay.mark.number > self._reached and not self._lane.has_passed(stay.mark):",
        "if False:",
        _IN_SLOTS,
    ),
    Bug(
        "offloading: an expert that has left a GPU is still told",
        _SLOTS,
        "                self._told.pop(layer, None)\n        return max",
        "                pass\n        return max",
        _IN_SLOTS,
    ),
    Bug(
        "offloading: hints fill a GPU's queue of copies",
        _SLOTS,
        "elif room > 0:",
        "else:",
        _IN_SLOTS,
    ),
    Bug(
        "foretelling: a prompt runs what was foretold",
        "actors/moe/prefetcher.py",
        "is_run = key.decodes and self._foresight.is_run(key.layer)",
        "is_run = self._foresight.is_run(key.layer)",
        _SUMS,
    ),
    Bug(
        "foretelling: a layer that is to be exact runs what was foretold",
        "models/prediction/expert_predictor.py",
        "speculation.layers is None or layer in speculation.layers",
        "True",
        _SUMS,
    ),
    Bug(
        "foretelling: the way that costs more is kept",
        "planner/scheduling/prefetch_trial.py",
        "_usual(self._costs[True]) <= _usual(self._costs[False])",
        "_usual(self._costs[True]) >= _usual(self._costs[False])",
        ("tests/unit/planner/scheduling/test_prefetch_trial.py",),
    ),
    Bug(
        "foretelling: a pass that finds what the other way has left counts",
        "planner/scheduling/prefetch_trial.py",
        "        self._counts = False\n        if self._blocks == 1:",
        "        self._counts = True\n        if self._blocks == 1:",
        ("tests/unit/planner/scheduling/test_prefetch_trial.py",),
    ),
    Bug(
        "foretelling: precision moves away from what came",
        "models/prediction/expert_predictor.py",
        "means[rank] += _NEWEST * (right - means[rank])",
        "means[rank] -= _NEWEST * (right - means[rank])",
        _FORESEEN,
    ),
)
