"""Which replica takes a pair, and the counts that placements are made of."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_REPLICAS = "planner/placement/replicas.py"
_CHOSEN = ("tests/property/test_replicas.py",)
_LEVELS = "planner/placement/levels.py"
_FEW_PAIRS = "planner/placement/few_pairs.py"
_FEW_RANKS = "planner/placement/few_ranks.py"
_LEVELLED = ("tests/property/test_levels.py",)
_COUNTS = ("tests/unit/models/prediction/test_routing_counts.py",)

BUGS: tuple[Bug, ...] = (
    Bug(
        "replicas: every rank that has an expert is taken for one that the token must go to",
        _REPLICAS,
        "has_ER.sum(axis=1) == 1",
        "has_ER.sum(axis=1) >= 1",
        _CHOSEN,
    ),
    Bug(
        "replicas: any set of ranks that has a token's experts will do",
        "planner/placement/rank_sets.py",
        "((has_CR.sum(axis=1) << ranks) - wanted_C).argsort()",
        "(-wanted_C).argsort()",
        _CHOSEN,
    ),
    Bug(
        "replicas: any rank that has something of what is left will do, of few pairs",
        _FEW_PAIRS,
        "strict=True) if n == found)",
        "strict=True) if n)",
        _CHOSEN,
    ),
    Bug(
        "replicas: of few pairs one may go to a rank that its token does not go to",
        _FEW_PAIRS,
        "ranks = members(sets_E[expert] & chosen)",
        "ranks = members(sets_E[expert])",
        _CHOSEN,
    ),
    Bug(
        "replicas: of two ranks a token that either has may go to both",
        "planner/placement/two_ranks.py",
        "ranks_KT[:, tokens_U] = _spread",
        "ranks_KT[1:, tokens_U] = _spread",
        _CHOSEN,
    ),
    Bug(
        "replicas: what two experts of a token go to is not kept for both",
        _FEW_RANKS,
        "where=np.logical_not(allowed_KT & shared_T)",
        "where=np.logical_not(allowed_KT & 0)",
        _CHOSEN,
    ),
    Bug(
        "replicas: what a free rank has is looked for elsewhere too",
        _FEW_RANKS,
        "sets_KT *= (sets_KT >> free_rank & 1) == 0",
        "sets_KT *= 1",
        _CHOSEN,
    ),
    Bug(
        "replicas: who has too much gets more",
        _LEVELS,
        "log_R = log_R + (level - now_R) * step_R",
        "log_R = log_R - (level - now_R) * step_R",
        _LEVELLED,
    ),
    Bug(
        "replicas: divided in turns, each gets the rank of another",
        _LEVELS,
        "return _apart(rank_N) if spread else rank_N",
        "return rank_N",
        _LEVELLED,
    ),
    Bug(
        "replicas: what leaves a rank is counted as if no rank had any for itself",
        "planner/schedule/placed_routing.py",
        "placed.of_pairs(mine[start : start + BATCH_TOKENS], home)",
        "placed.of_pairs(mine[start : start + BATCH_TOKENS])",
        ("tests/unit/planner/schedule/test_placed_routing.py",),
    ),
    Bug(
        "replicas: experts are loaded from whatever checkpoint is there now",
        "actors/rebalance/expert_loading.py",
        "if fingerprint(folder) != self._loaded:",
        "if not folder.exists():",
        ("tests/faults/test_moving_experts.py",),
    ),
    Bug(
        "replicas: a noted token has the path of another",
        "actors/moe/routing_sample.py",
        "topk_ids_TK[noted.rows]",
        "topk_ids_TK[: len(noted.rows)]",
        ("tests/unit/actors/moe/test_routing_sample.py",),
    ),
    Bug(
        "replicas: what was counted before experts moved is forgotten",
        "actors/moe/dispatch.py",
        "pairs_E = self._before_E.copy()",
        "pairs_E = np.zeros_like(self._before_E)",
        ("tests/unit/actors/moe/test_dispatch_counts.py",),
    ),
    Bug(
        "replicas: of two ranks the busier gets more",
        _LEVELS,
        "first = (items * pairs + load_R[other] - load_R[one] + pairs)",
        "first = (items * pairs + load_R[one] - load_R[other] + pairs)",
        _CHOSEN,
    ),
    Bug(
        "replicas: ranks are filled as if none had anything yet",
        _LEVELS,
        "heights = [load_R[rank] for rank in ranks]",
        "heights = [0 for _ in ranks]",
        _CHOSEN,
    ),
    Bug(
        "counts: what comes often is left out",
        "models/prediction/bounded_counts.py",
        "np.partition(times, -most - 1)[-most - 1]",
        "np.partition(times, most)[most]",
        _COUNTS,
    ),
    Bug(
        "counts: what was taken is not said",
        "models/prediction/bounded_counts.py",
        "self._short += taken",
        "self._short = taken",
        _COUNTS,
    ),
    Bug(
        "counts: of two profiles one sample is kept",
        "models/prediction/path_sample.py",
        "return _joined(some(one, of_one), some(other, most - of_one))",
        "return some(one, most)",
        _COUNTS,
    ),
    Bug(
        "counts: late tokens replace early ones always",
        "models/prediction/path_sample.py",
        "self._random.random(len(late)) * (late + 1)",
        "self._random.random(len(late)) * self._most",
        _COUNTS,
    ),
    Bug(
        "counts: a layer's experts are looked up in another one's",
        "models/prediction/routing_counts.py",
        "self.paths.paths_PLK[:, position]",
        "self.paths.paths_PLK[:, 0]",
        _COUNTS,
    ),
    Bug(
        "counts: another tokenizer's are read",
        "models/prediction/routing_counts.py",
        "        check_fingerprint(file, _TOKENIZER, tokenizer_digest(folder), folder)\n",
        "",
        ("tests/unit/models/prediction/test_counts_file.py",),
    ),
    Bug(
        "counts: unseen tokens are nobody's",
        "models/prediction/count_predictor.py",
        "found_W[some] = profiled_N[nearest.numpy()]",
        "found_W[some] = profiled_N[0]",
        ("tests/unit/models/prediction/test_count_predictor.py",),
    ),
    Bug(
        "counts: a rank that has gone is not missed",
        "dashboards/rules.py",
        'unless {per_rank} ({busy}) "',
        'unless {per_rank} (last_over_time({busy}[{ten}])) "',
        ("tests/unit/dashboards/test_rules.py",),
    ),
)
