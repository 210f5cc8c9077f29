"""What an operator sees, sets and asks."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_EXPORTERS = ("tests/unit/actors/telemetry/test_exporter.py",)
_SCRAPE_KEY = ("tests/unit/actors/telemetry/test_scrape_key.py",)
_TARGETS = ("tests/unit/cluster/fleet/test_scrape_targets.py",)
_TRACES = ("tests/unit/cluster/observe/test_tracing.py",)
_KEYS = ("tests/unit/cluster/http/test_key_reloader.py",)
_CORES = "planner/schedule/shared_cores.py"

BUGS: tuple[Bug, ...] = (
    Bug(
        "doctor: a list that somebody else wrote is believed",
        "cluster/fleet/targets_file.py",
        "if owner not in (0, os.geteuid()):",
        "if owner < 0:",
        ("tests/unit/cluster/tools/doctor/test_exporter_checks.py",),
    ),
    Bug(
        "doctor: a rank that is not listed is not missed",
        "cluster/tools/doctor/server_checks.py",
        "for rank in ranks if rank not in named]",
        "for rank in ranks if rank in named]",
        ("tests/unit/cluster/tools/doctor/test_exporter_checks.py",),
    ),
    Bug(
        "doctor: a move that its deadline ends is fine",
        "cluster/tools/doctor/expert_checks.py",
        "if most_bytes > in_time:",
        "if most_bytes > 1 << 62:",
        ("tests/unit/cluster/tools/doctor/test_expert_checks.py",),
    ),
    Bug(
        "keys: an exporter takes a file in the middle of being written",
        "actors/telemetry/scrape_key.py",
        "and now_s - self._since_s >= STANDS_S:",
        "and now_s >= self._since_s:",
        _SCRAPE_KEY,
    ),
    Bug(
        "keys: a file that is gone opens exporters",
        "actors/telemetry/scrape_key.py",
        "            return self._key\n\n    def _look",
        "            return self._key if seen else None\n\n    def _look",
        _SCRAPE_KEY,
    ),
    Bug(
        "keys: a file is taken in the middle of being written",
        "cluster/http/key_reloader.py",
        "elif seen == before and seen != self._judged:",
        "elif seen != self._judged:",
        _KEYS,
    ),
    Bug(
        "keys: who is not in the file is let in until it is read",
        "cluster/http/authenticator.py",
        "self._is_open = not needs_keys and not api_keys",
        "self._is_open = not api_keys",
        _KEYS,
    ),
    Bug(
        "keys: a word of the file is told",
        "contracts/keys_file.py",
        "    if unknown is None:\n        ours",
        "    if True:\n        ours",
        _KEYS,
    ),
    Bug(
        "logs: what a bug says of a request is logged",
        "cluster/http/app.py",
        "error, is_private=True, ",
        "error, ",
        ("tests/unit/cluster/http/test_logs.py",),
    ),
    Bug(
        "logs: the stacks of a held loop are told at each look",
        "actors/channels/loop_watchdog.py",
        "            self._has_told = True\n",
        "",
        ("tests/unit/actors/channels/test_loop_watchdog.py",),
    ),
    Bug(
        "logs: a rank's sequences do not carry their request's id",
        "cluster/http/authenticator.py",
        "next(self._numbers), caller.salt, name)",
        "next(self._numbers), caller.salt)",
        ("tests/unit/cluster/http/test_logs.py",),
    ),
    Bug(
        "metrics: what is added up before anybody asks is not told",
        "actors/telemetry/telemetry.py",
        "        if len(self._values) >= MOST_NOTED:\n            self.tell()",
        "        if len(self._values) >= MOST_NOTED:\n            self._values.clear()",
        ("tests/unit/actors/telemetry/test_rank_metrics.py",),
    ),
    Bug(
        "metrics: whoever has an exporter's port answers for who had it before",
        "actors/telemetry/exporter.py",
        "if asked.path not in (PATH, self._path):",
        "if not asked.path.startswith(PATH):",
        _EXPORTERS,
    ),
    Bug(
        "metrics: a request id of any length stands beside its latency",
        "actors/telemetry/telemetry.py",
        "request_id[:_EXEMPLAR_CHARACTERS]",
        "request_id",
        _EXPORTERS,
    ),
    Bug(
        "metrics: two clusters of a name share a list of targets",
        "cluster/fleet/scrape_targets.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        _TARGETS,
    ),
    Bug(
        "metrics: a process that has said nothing for long is still scraped",
        "cluster/fleet/scrape_targets.py",
        "if lease[1] > now_s}",
        "if lease}",
        _TARGETS,
    ),
    Bug(
        "plan: ranks that wait take a core",
        _CORES,
        "self.attention_ranks * attention, self.expert_ranks * experts",
        "self.attention_ranks, self.expert_ranks",
        ("tests/property/test_shared_cores.py",),
    ),
    Bug(
        "plan: links wait for a core, too",
        _CORES,
        "self.a2e_free = max(self.a2e_free, self.now) + group.a2e_ms",
        "self.a2e_free = max(self.a2e_free, self.now) + 2 * group.a2e_ms",
        ("tests/property/test_shared_cores.py",),
    ),
    Bug(
        "plan: packets to further ranks cost the attention rank nothing",
        "planner/costs/cost_model.py",
        "more_copies = max(0.0, spread.copies - 1)",
        "more_copies = 0.0",
        ("tests/unit/planner/costs/test_cost_model.py",),
    ),
    Bug(
        "plan: a group of short prompts is as many calls as prompts",
        "planner/costs/model_shape.py",
        "if fits and (members + 1) * high <= GROUP_SLOTS:",
        "if fits and members < 1:",
        ("tests/property/test_attention_calls.py",),
    ),
    Bug(
        "plan: decode is padded without end",
        "planner/costs/model_shape.py",
        "if fits and width >= MIN_FILL * longest:",
        "if fits:",
        ("tests/property/test_attention_calls.py",),
    ),
    Bug(
        "plan: the calls of a micro-batch are those of its chunks, each by itself",
        "planner/costs/model_shape.py",
        "return total._replace(prompt_calls=calls.prompts, decode_calls=calls.decodes)",
        "return total",
        ("tests/unit/planner/costs/test_cost_model.py",),
    ),
    Bug(
        "plan: logits are read for nothing",
        "planner/costs/cost_model.py",
        "(cost.sequence_ms + logits_ms) * sequences",
        "cost.sequence_ms * sequences",
        ("tests/unit/planner/costs/test_cost_model.py",),
    ),
    Bug(
        "traces: a clock is taken for ahead that is behind",
        "cluster/fleet/tracing.py",
        "    offset_s = shown_s - (asked_s + known_s) / 2\n",
        "    offset_s = (asked_s + known_s) / 2 - shown_s\n",
        _TRACES,
    ),
    Bug(
        "traces: the slowest round trip is believed",
        "cluster/fleet/tracing.py",
        "= min(rounds, key",
        "= max(rounds, key",
        _TRACES,
    ),
    Bug(
        "traces: what has been overwritten is not told",
        "actors/telemetry/timeline.py",
        "is_cut=is_full and bool(spans) and spans[0].end_s >= since_s,",
        "is_cut=False,",
        _TRACES,
    ),
)
