"""The bugs: one wrong line each, of the kind that is really written, and the tests to find it."""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    """`old` occurs once in `file`. tests: files, in the order in which they are tried."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def area(self) -> str:
        return self.name.partition(":")[0]


_SCHEDULER = ("tests/unit/actors/batching/test_scheduler.py",)
_BOOKS = ("tests/property/test_block_manager.py", "tests/property/test_block_contents.py")
_SAMPLER = ("tests/property/test_sampler.py", "tests/unit/actors/ranks/test_sampling_on_ranks.py")
_EXECUTOR = ("tests/unit/actors/engine/test_executor.py",)
_DISPATCH = ("tests/property/test_dispatch.py", "tests/unit/actors/engine/test_executor.py")
_REPLICAS, _CHOSEN = "planner/placement/replicas.py", ("tests/property/test_replicas.py",)
_ROUTER = ("tests/property/test_router.py", "tests/unit/planner/routing/test_router.py")
_PROMISES = ("tests/property/test_promises.py", "tests/property/test_router.py")
_JOURNAL = ("tests/unit/actors/ranks/test_worker_log.py",)
_HANDSHAKE = ("tests/unit/actors/channels/test_handshake.py",)
_SHARES = ("tests/property/test_share_floor.py",)
_CHOICE = ("tests/unit/planner/policies/test_preemption.py",)
_MEMORY = ("tests/property/test_giving_way.py",)
_DOOR, _LATER = "cluster/routing/door.py", "planner/policies/appointments.py"
_TCP, _USER = "actors/channels/tcp.py", "planner/user/policy.py"
_SHARE, _PREEMPTION = "planner/policies/share.py", "planner/policies/preemption.py"
_LANES = ("tests/unit/actors/channels/test_tcp_lanes.py",)
_DOORS = ("tests/unit/cluster/routing/test_door.py", "tests/unit/planner/policies/test_drain.py")
_APPOINTMENTS = ("tests/unit/planner/policies/test_appointments.py",)
_YIELDS = ("tests/oracle/test_interrupted_tasks.py",)
_OWN = ("tests/unit/planner/user/test_policy.py",)
_BLOCKS, _ROUTES = "actors/kv/block_manager.py", "planner/routing/router.py"
_STATE, _SHAKES = "planner/routing/worker_state.py", "actors/channels/handshake.py"

_CACHE, _CACHED = (
    "models/experts/expert_cache.py",
    ("tests/unit/models/experts/test_expert_cache.py",),
)
_RANK, _ON_RANK = (
    "actors/experts/rank_experts.py",
    ("tests/unit/actors/experts/test_rank_experts.py",),
)
_SUMS = ("tests/unit/actors/experts/test_cached_plane.py",)
_SLOTS, _IN_SLOTS = (
    "models/experts/device_tier.py",
    ("tests/unit/actors/experts/test_device_plane.py",),
)
_FORESEEN = ("tests/unit/models/foresight/test_foresight.py",)
_GENERATIONS, _SWITCHING, _FOLLOWING = (
    "actors/experts/generations.py",
    "actors/experts/switching.py",
    ("tests/property/test_generations.py",),
)
_FOLLOWER = "planner/placement/following.py"
_FOLLOWER_TESTS = ("tests/unit/planner/placement/test_following.py",)
_COUNTS = ("tests/unit/models/foresight/test_routing_counts.py",)

BUGS: tuple[Bug, ...] = (
    Bug(
        "scheduler: best effort takes blocks from the other class",
        "actors/batching/scheduler.py",
        "if not s.in_flight and s.priority is priority]",
        "if not s.in_flight]",
        _MEMORY,
    ),
    Bug(
        "scheduler: the oldest is the victim",
        "actors/batching/scheduler.py",
        "return (greedy or candidates)[-1]",
        "return (greedy or candidates)[0]",
        _SCHEDULER,
    ),
    Bug(
        "scheduler: the copied block is not released after the batch",
        "actors/batching/scheduler.py",
        "commit(batch.number)\n        self._release(batch.sources, batch.priority)\n",
        "commit(batch.number)\n",
        _SCHEDULER,
    ),
    Bug(
        "scheduler: a block counts as full one token early",
        "actors/batching/scheduler.py",
        "digest = hashes[place] if last <= chunk.stop else None",
        "digest = hashes[place] if last <= chunk.stop + 1 else None",
        (*_SCHEDULER, *_EXECUTOR),
    ),
    Bug(
        "scheduler: what was scored stays when a sequence begins again",
        "actors/batching/scheduler.py",
        "        sequence.scored.clear()\n",
        "",
        (*_SCHEDULER, "tests/unit/benchmarks/test_prefill_rows.py"),
    ),
    Bug(
        "blocks: another batch's unfinished block is shared",
        _BLOCKS,
        "if block is None or self._pending.get(block, batch) != batch:",
        "if block is None:",
        (*_BOOKS, *_SCHEDULER),
    ),
    Bug(
        "blocks: cached blocks that a sequence takes are counted as available",
        _BLOCKS,
        "if fresh > self.available - revived:",
        "if fresh > self.available:",
        _BOOKS,
    ),
    Bug(
        "blocks: the newest is evicted",
        _BLOCKS,
        "block, _ = cached.popitem(last=False)",
        "block, _ = cached.popitem(last=True)",
        (*_BOOKS, *_SCHEDULER),
    ),
    Bug(
        "blocks: an evicted block's hash is still known",
        _BLOCKS,
        "            self._forget(block)\n            self.evicted_total += 1\n",
        "            self.evicted_total += 1\n",
        _BOOKS,
    ),
    Bug(
        "blocks: a failed batch's blocks stay known",
        _BLOCKS,
        '"""`batch` failed: what it would have filled is forgotten."""\n',
        '"""`batch` failed: what it would have filled is forgotten."""\n        return\n',
        (*_BOOKS, *_SCHEDULER),
    ),
    Bug(
        "sampler: top_p drops one token too many",
        "actors/batching/sampler.py",
        "(probs_K.cumsum(-1) - probs_K) >= sampling.top_p",
        "probs_K.cumsum(-1) >= sampling.top_p",
        _SAMPLER,
    ),
    Bug(
        "sampler: top_k keeps one token more",
        "actors/batching/sampler.py",
        "limit = sampling.top_k if sampling.top_k > 0 else len(scaled_V)",
        "limit = sampling.top_k + 1 if sampling.top_k > 0 else len(scaled_V)",
        _SAMPLER,
    ),
    Bug(
        "sampler: logits are multiplied by the temperature",
        "actors/batching/sampler.py",
        "scaled_V = logits_V / sampling.temperature",
        "scaled_V = logits_V * sampling.temperature",
        _SAMPLER,
    ),
    Bug(
        "sampler: a seed is not taken",
        "actors/batching/sampler.py",
        "sequence.generator.manual_seed(sampling.seed % 2**63)",
        "sequence.generator.seed()",
        _SAMPLER,
    ),
    Bug(
        "executor: a layer runs once one answer is missing",
        "actors/experts/remote_plane.py",
        "        pending.missing -= 1\n",
        "        pending.missing -= 2 if pending.missing == 2 else 1\n",
        _EXECUTOR,
    ),
    Bug(
        "executor: the loss that follows is taken for the cause",
        "actors/experts/remote_plane.py",
        "lost = lost or happening.error",
        "lost = happening.error",
        _EXECUTOR,
    ),
    Bug(
        "executor: answers to a failed batch keep their memory",
        "actors/experts/remote_plane.py",
        "            packet.release()  # an answer to a batch that has failed\n",
        "",
        _EXECUTOR,
    ),
    Bug(
        "executor: the layer after the last is attended",
        "actors/engine/executor.py",
        "is_last = micro_batch.layer == self.layers",
        "is_last = micro_batch.layer > self.layers",
        _EXECUTOR,
    ),
    Bug(
        "executor: best effort goes first",
        "planner/findep/orders.py",
        "return (task.priority, task.due_s, task.batch, not task.begun, *position(task))",
        "return (-task.priority, task.due_s, task.batch, not task.begun, *position(task))",
        _EXECUTOR,
    ),
    Bug(
        "dispatch: a token on a group's edge is of the group after",
        "actors/experts/dispatch.py",
        "group_T[[start for start, _ in token_groups[1:]]]",
        "group_T[[start - 1 for start, _ in token_groups[1:]]]",
        _DISPATCH,
    ),
    Bug(
        "dispatch: weights stand in the tokens' order, pairs in the experts'",
        "actors/experts/dispatch.py",
        "weights_N = topk_weights_TK.ravel()[order_N]",
        "weights_N = topk_weights_TK.ravel()",
        _DISPATCH,
    ),
    Bug(
        "dispatch: rows count from the group's start",
        "actors/experts/dispatch.py",
        "rows_N[low:high] - piece.rank * tokens",
        "rows_N[low:high] - first",
        _DISPATCH,
    ),
    Bug(
        "dispatch: positions among the distinct tokens are one too high",
        "actors/experts/dispatch.py",
        "index_N = before_N[at_N] - before_N[first_N]",
        "index_N = before_N[at_N + 1] - before_N[first_N]",
        _DISPATCH,
    ),
    Bug(
        "replicas: every rank that has an expert is taken for one that the token must go to",
        _REPLICAS,
        "has_ER.sum(axis=1) == 1",
        "has_ER.sum(axis=1) >= 1",
        _CHOSEN,
    ),
    Bug(
        "replicas: any rank that has something of what is left will do",
        _REPLICAS,
        "self._packed(counts_UR == most_U[:, None])",
        "self._packed(counts_UR > 0)",
        _CHOSEN,
    ),
    Bug(
        "replicas: of two ranks the busier gets more",
        _REPLICAS,
        "twice = items * pairs + load_R[other] - load_R[one] + pairs",
        "twice = items * pairs + load_R[one] - load_R[other] + pairs",
        _CHOSEN,
    ),
    Bug(
        "replicas: ranks are filled as if none had anything yet",
        _REPLICAS,
        "heights = [load_R[rank] for rank in ranks]",
        "heights = [0 for _ in ranks]",
        _CHOSEN,
    ),
    Bug(
        "dispatch: a packet carries the layer that comes next",
        "actors/experts/remote_plane.py",
        "            key.layer,\n            key.micro_batch,",
        "            key.layer + 1,\n            key.micro_batch,",
        _EXECUTOR,
    ),
    Bug(
        "dispatch: the shared experts' output is left out",
        "actors/experts/remote_plane.py",
        "            total_TD += shared_TD\n",
        "            pass\n",
        _EXECUTOR,
    ),
    Bug(
        "router: a saturated worker is taken",
        "planner/routing/route_policies.py",
        "if candidate.queued < candidate.threshold]",
        "if candidate.queued <= candidate.threshold]",
        (*_ROUTER, "tests/property/test_backlog.py"),
    ),
    Bug(
        "router: the shortest match is taken",
        "planner/routing/route_policies.py",
        "    return -candidate.matched_blocks, load, candidate.worker\n",
        "    return candidate.matched_blocks, load, candidate.worker\n",
        (*_ROUTER, "tests/property/test_backlog.py"),
    ),
    Bug(
        "router: what an ended request promised stays",
        _ROUTES,
        "        for prompt in ended:\n            self._pending.remove(worker, prompt.hashes)\n",
        "",
        _ROUTER,
    ),
    Bug(
        "router: an accepted request counts twice",
        _ROUTES,
        "            if key in self._own[worker]:\n                self.withdraw(key)\n",
        "            pass\n",
        _ROUTER,
    ),
    Bug(
        "router: only committed blocks are matched",
        _ROUTES,
        "return max(committed, self._pending.match(worker, prompt.hashes))",
        "return committed",
        (*_ROUTER, "tests/property/test_backlog.py"),
    ),
    Bug(
        "router: a promise ends with the first of two that made it",
        "planner/routing/promises.py",
        "            if run.workers[worker] == 0:\n                self._drop(run, worker)\n",
        "            self._drop(run, worker)\n",
        _PROMISES,
    ),
    Bug(
        "journal: a report of an epoch that is closed is folded",
        _STATE,
        "return epoch <= self._closed_epoch or (epoch, number) <= (self.epoch, self.number)",
        "return (epoch, number) <= (self.epoch, self.number)",
        ("tests/unit/planner/routing/test_worker_state.py",),
    ),
    Bug(
        "journal: a gap in the reports is not noticed",
        _STATE,
        "if (report.epoch, report.number) != (self.epoch, self.number + 1):",
        "if report.epoch != self.epoch:",
        ("tests/unit/planner/routing/test_worker_state.py",),
    ),
    Bug(
        "journal: evicted blocks stay committed",
        _STATE,
        "            self._committed.pop(digest, None)\n",
        "            pass\n",
        (*_ROUTER, *_JOURNAL),
    ),
    Bug(
        "journal: stored and evicted are swapped",
        "actors/ranks/worker_log.py",
        "self._cache.update(dict.fromkeys(digests, False))",
        "self._cache.update(dict.fromkeys(digests, True))",
        _JOURNAL,
    ),
    Bug(
        "journal: an ended request stays open",
        "actors/ranks/worker_log.py",
        "        self._open.remove(key)\n",
        "",
        _JOURNAL,
    ),
    Bug(
        "journal: all tokens of a prompt can be cached",
        _STATE,
        "return min(blocks, (prompt.prompt_tokens - 1) // block_tokens) * block_tokens",
        "return min(blocks, prompt.prompt_tokens // block_tokens) * block_tokens",
        (*_ROUTER, *_JOURNAL),
    ),
    Bug(
        "handshake: the acceptor's proof is not looked at",
        _SHAKES,
        'if not hmac.compare_digest(reply.proof, _proof(me, "acceptor", challenge, hello, bare)):',
        "if not reply.proof:",
        _HANDSHAKE,
    ),
    Bug(
        "handshake: the proof does not hold the challenge",
        _SHAKES,
        "hmac.digest(me.token, msgspec.msgpack.encode((label, *said))",
        "hmac.digest(me.token, msgspec.msgpack.encode((label, *said[1:]))",
        _HANDSHAKE,
    ),
    Bug(
        "handshake: another epoch is let in",
        _SHAKES,
        "if hello.epoch != me.epoch:",
        "if hello.epoch is None and me.epoch is not None:",
        _HANDSHAKE,
    ),
    Bug(
        "handshake: whom it looks for is not compared",
        _SHAKES,
        "if hello.to is not None and hello.to != me.name:",
        "if hello.to is not None and not hello.to:",
        _HANDSHAKE,
    ),
    Bug(
        "blocks: a hash does not hold its parent",
        "contracts/block_hash.py",
        "hashlib.blake2b(parent + block.tobytes()",
        "hashlib.blake2b(block.tobytes()",
        ("tests/unit/contracts/test_block_hash.py",),
    ),
    Bug(
        "shares: no credit while LS runs",
        _PREEMPTION,
        "        if self._be_waits:\n",
        "        if self._holding:\n",
        _SHARES,
    ),
    Bug(
        "shares: the clamp is the wrong way round",
        _SHARE,
        "max(self.credit_s - charge, -charge)",
        "min(self.credit_s - charge, -charge)",
        _SHARES,
    ),
    Bug(
        "shares: what BE had for nothing is held against it for ever",
        _SHARE,
        "max(self.credit_s - charge, -charge)",
        "self.credit_s - charge",
        _SHARES,
    ),
    Bug(
        "shares: a slice costs no credit that is not there",
        _SHARE,
        "max(self.credit_s - charge, -charge)",
        "max(self.credit_s - charge, 0.0)",
        _SHARES,
    ),
    Bug(
        "shares: to hold counts as service",
        _PREEMPTION,
        "            self._holding = True\n",
        "            self._holding, self._be_waits = True, False\n",
        _SHARES,
    ),
    Bug(
        "shares: BE is held although it is owed",
        _PREEMPTION,
        "if first is not None and self._floor.is_owed:",
        "if mine and first is not None and self._floor.is_owed:",
        _SHARES,
    ),
    Bug(
        "shares: BE goes first without credit",
        _SHARE,
        "return self.credit_s > 0.0",
        "return self.credit_s >= 0.0",
        _SHARES,
    ),
    Bug(
        "shares: credit grows while BE is not there",
        _PREEMPTION,
        "        self._be_waits = False\n        mine",
        "        mine",
        _SHARES,
    ),
    Bug(
        "shares: dropped work is owed the idle time after it",
        _PREEMPTION,
        "        self._be_waits = self._holding = False\n\n    def _pass_time",
        "        pass\n\n    def _pass_time",
        _CHOICE,
    ),
    Bug(
        "shares: a second task of BE begins",
        _PREEMPTION,
        "[work for work in others if work.begun] or others",
        "others",
        _CHOICE,
    ),
    Bug(
        "scheduler: of idle BE the most computed gives way",
        "actors/batching/scheduler.py",
        "self._requeue(min(idle, ",
        "self._requeue(max(idle, ",
        _MEMORY,
    ),
    Bug(
        "scheduler: no batch is dropped for LS",
        "actors/batching/scheduler.py",
        "        batch = self.drop_best_effort()\n",
        "        batch = None\n",
        _MEMORY,
    ),
    Bug(
        "scheduler: BE gives way where no block would help",
        "actors/batching/scheduler.py",
        "            and self._has_room(sequence, tokens, len(chunks))\n",
        "",
        _MEMORY,
    ),
    Bug(
        "blocks: what LS left is evicted first",
        _BLOCKS,
        "self._cached_later or self._cached",
        "self._cached or self._cached_later",
        _BOOKS,
    ),
    Bug(
        "lanes: a BE packet under way is finished first",
        _TCP,
        "next(lane for lane in lanes if lane)",
        "next(lane for lane in reversed(lanes) if lane)",
        _LANES,
    ),
    Bug(
        "lanes: LS that fills the line starves BE",
        _TCP,
        "                if passed_over == BEST_EFFORT_TURN:\n",
        "                if False:\n",
        _LANES,
    ),
    Bug(
        "lanes: what commit has begun of a packet waits for its turn",
        _TCP,
        "                    self._send_whole(packet.begun)\n",
        "",
        _LANES,
    ),
    Bug(
        "lanes: a packet may begin in another",
        _TCP,
        "        if before is not None:\n",
        "        if False:\n",
        _LANES,
    ),
    Bug(
        "door: both classes have one queue",
        _DOOR,
        "{priority: _Half(slots, config) for priority in Priority}",
        "dict.fromkeys(Priority, _Half(slots, config))",
        _DOORS,
    ),
    Bug(
        "door: BE may wait for what all the ranks can do",
        _DOOR,
        "            share, longest_s = config.be_share, config.be_max_wait_s\n",
        "            share, longest_s = 1.0, config.be_max_wait_s\n",
        _DOORS,
    ),
    Bug(
        "door: all are told to come at the same time",
        _DOOR,
        "wait_s = retry_after_s(excess / PROMISED, rate)",
        "wait_s = retry_after_s(half.tokens_each, rate)",
        _DOORS,
    ),
    Bug(
        "door: who comes when he was told is no better off than others",
        _DOOR,
        "0.0 if early_s == 0 else half",
        "half",
        _DOORS,
    ),
    Bug(
        "door: one tenant's promises are before everybody",
        _LATER,
        "turns = min(length, most)",
        "turns = length",
        _APPOINTMENTS,
    ),
    Bug(
        "door: each newcomer walks over all tenants that were promised something",
        _LATER,
        "whose = next(iter(self._equals[max(self._equals)].tenants))",
        "whose = max(self._lines, key=lambda one: len(self._lines[one].requests))",
        _APPOINTMENTS,
    ),
    Bug(
        "door: a tenant whose line grows is still counted among the shorter ones",
        _LATER,
        "        equals.amount -= line.amount\n",
        "",
        _APPOINTMENTS,
    ),
    Bug(
        "steps: all pairs of one expert are one step, however many",
        "kernels/experts.py",
        "piece = min(count, RUN_PAIRS) if cut else count",
        "piece = count",
        _YIELDS,
    ),
    Bug(
        "steps: the output product is one step, however long the batch",
        "models/decoder/attention.py",
        "        for tile in row_tiles(attended_TD):\n",
        "        for tile in [slice(None)]:\n",
        _YIELDS,
    ),
    Bug(
        "steps: a tile's queries are turned to the places of the batch's first ones",
        "models/decoder/attention.py",
        "prepared.cos[rows], prepared.sin[rows]",
        "prepared.cos[: len(x_THd)], prepared.sin[: len(x_THd)]",
        _YIELDS,
    ),
    Bug(
        "user policy: a failure does not count",
        _USER,
        "        self.failures += 1\n",
        "",
        _OWN,
    ),
    Bug(
        "user policy: what it gives is not looked at",
        _USER,
        "        if not self._is_one(given, result):\n",
        "        if False:\n",
        _OWN,
    ),
    Bug(
        "user policy: it may let everything wait for ever",
        _USER,
        "        elif now_s - self._held_since_s > HELD_S:\n",
        "        elif False:\n",
        _OWN,
    ),
    Bug(
        "offloading: what is wanted and there is evicted",
        _CACHE,
        "return self._evict(layer, lambda key: self._is_wanted(key, priority))",
        "return self._evict(layer, lambda key: False)",
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
        "models/experts/expert_form.py",
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
        "actors/experts/expert_server.py",
        "                    self._experts.dropped(packet)\n",
        "",
        _ON_RANK,
    ),
    Bug(
        "offloading: what misses experts goes first",
        "planner/findep/expert_queues.py",
        "head.missing > 0, not head.begun",
        "head.missing == 0, not head.begun",
        _ON_RANK,
    ),
    Bug(
        "foretelling: a prompt runs what was foretold",
        "actors/experts/looking_ahead.py",
        "is_run = key.decodes and self._foresight.is_run(key.layer)",
        "is_run = self._foresight.is_run(key.layer)",
        _SUMS,
    ),
    Bug(
        "foretelling: a layer that is to be exact runs what was foretold",
        "models/foresight/foresight.py",
        "speculation.layers is None or layer in speculation.layers",
        "True",
        _SUMS,
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
        "foretelling: the way that costs more is kept",
        "planner/policies/read_ahead.py",
        "_usual(self._costs[True]) <= _usual(self._costs[False])",
        "_usual(self._costs[True]) >= _usual(self._costs[False])",
        ("tests/unit/planner/policies/test_read_ahead.py",),
    ),
    Bug(
        "foretelling: precision moves away from what came",
        "models/foresight/foresight.py",
        "means[rank] += _NEWEST * (right - means[rank])",
        "means[rank] -= _NEWEST * (right - means[rank])",
        _FORESEEN,
    ),
    Bug(
        "placement: a PLACED that crossed a refusal counts",
        _SWITCHING,
        "if attempt != candidate.attempt:",
        "if False:",
        _FOLLOWING,
    ),
    Bug(
        "placement: freed when one class has nothing more to come",
        _GENERATIONS,
        "return min(self.retired.values()) >= generation",
        "return max(self.retired.values()) >= generation",
        _FOLLOWING,
    ),
    Bug(
        "placement: freed when one attention rank refuses",
        _GENERATIONS,
        "if all(peer.refused for peer in peers):",
        "if any(peer.refused for peer in peers):",
        _FOLLOWING,
    ),
    Bug(
        "placement: retired while something older is under way",
        _SWITCHING,
        "if not self._owes_retired or any(older < self.generation for older in self._live):",
        "if not self._owes_retired:",
        _FOLLOWING,
    ),
    Bug(
        "placement: a refusal that came before the proposal is forgotten",
        _GENERATIONS,
        "peer.unborn = max(peer.unborn, generation)",
        "pass",
        _FOLLOWING,
    ),
    Bug(
        "placement: gone over to before all have it",
        _SWITCHING,
        "if len(candidate.placed) < len(self._experts):",
        "if len(candidate.placed) < len(self._experts) - 1:",
        _FOLLOWING,
    ),
    Bug(
        "placement: withdrawn after it was placed",
        _GENERATIONS,
        "loading = self._next is not None and self._next.stage is Stage.LOADING\n        return",
        "loading = self._next is not None\n        return",
        _FOLLOWING,
    ),
    Bug(
        "placement: who refused is not told that others use it",
        _GENERATIONS,
        "if not any(peer.uses(generation) for peer in peers):",
        "if True:",
        _FOLLOWING,
    ),
    Bug(
        "placement: a lost attention rank is waited for",
        _GENERATIONS,
        "if self._peers.pop(name, None) is None or self._next is None:",
        "if self._peers.get(name) is None or self._next is None:",
        _FOLLOWING,
    ),
    Bug(
        "placement: experts go back and forth with the traffic",
        _FOLLOWER,
        "return LEAST_GAIN * math.exp2(",
        "return LEAST_GAIN * 0 * (",
        _FOLLOWER_TESTS,
    ),
    Bug(
        "placement: what hurts the older half of the window is moved",
        _FOLLOWER,
        "if min(saved) < 0:",
        "if False:",
        _FOLLOWER_TESTS,
    ),
    Bug(
        "placement: a move brings in more than it may",
        _FOLLOWER,
        "if max(loads) <= most:",
        "if True:",
        _FOLLOWER_TESTS,
    ),
    Bug(
        "placement: a planner that begins anew uses a number again",
        _FOLLOWER,
        "self.newest = max(self.newest, newest, placement.generation)",
        "pass",
        _FOLLOWER_TESTS,
    ),
    Bug(
        "placement: the mean stands for layers that differ",
        "planner/findep/split_search.py",
        "if not layers:",
        "if True:",
        ("tests/unit/planner/findep/test_placed_routing.py",),
    ),
    Bug(
        "counts: what comes often is left out",
        "models/foresight/bounded_counts.py",
        "np.partition(times, -most - 1)[-most - 1]",
        "np.partition(times, most)[most]",
        _COUNTS,
    ),
    Bug(
        "counts: what was taken is not said",
        "models/foresight/bounded_counts.py",
        "self._short += taken",
        "self._short = taken",
        _COUNTS,
    ),
    Bug(
        "counts: of two profiles one sample is kept",
        "models/foresight/path_sample.py",
        "return _joined(some(one, of_one), some(other, most - of_one))",
        "return some(one, most)",
        _COUNTS,
    ),
    Bug(
        "counts: late tokens replace early ones always",
        "models/foresight/path_sample.py",
        "self._random.random(len(late)) * (late + 1)",
        "self._random.random(len(late)) * self._most",
        _COUNTS,
    ),
    Bug(
        "counts: a layer's experts are looked up in another one's",
        "models/foresight/routing_counts.py",
        "self.paths.paths_PLK[:, position]",
        "self.paths.paths_PLK[:, 0]",
        _COUNTS,
    ),
    Bug(
        "counts: another tokenizer's are read",
        "models/foresight/routing_counts.py",
        "        check_fingerprint(file, _TOKENIZER, tokenizer_digest(folder), folder)\n",
        "",
        ("tests/unit/models/foresight/test_counts_file.py",),
    ),
    Bug(
        "counts: unseen tokens are nobody's",
        "models/foresight/unseen.py",
        "found_W[some] = profiled_N[nearest.numpy()]",
        "found_W[some] = profiled_N[0]",
        ("tests/unit/models/foresight/test_count_guesses.py",),
    ),
)
