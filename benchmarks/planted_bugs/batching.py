"""What a rank puts into batches, its blocks, what it draws and runs."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_SCHEDULER = ("tests/unit/actors/batching/test_scheduler.py",)
_BOOKS = ("tests/property/test_block_manager.py", "tests/property/test_block_contents.py")
_SAMPLER = ("tests/property/test_sampler.py", "tests/unit/actors/ranks/test_sampling_on_ranks.py")
_EXECUTOR = ("tests/unit/actors/engine/test_executor.py",)
_MEMORY = ("tests/property/test_preemption_memory.py",)
_YIELDS = ("tests/oracle/test_interrupted_tasks.py",)
_BLOCKS = "actors/kv/block_manager.py"
_SUMS = ("tests/unit/actors/offload/test_cached_backend.py",)

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
        "actors/batching/batch_builder.py",
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
        "if not batch.has_room(sequence) or not self._take",
        "if not self._take",
        _MEMORY,
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
        "blocks: a hash does not hold its parent",
        "contracts/block_hash.py",
        "hashlib.blake2b(parent + block.tobytes()",
        "hashlib.blake2b(block.tobytes()",
        ("tests/unit/contracts/test_block_hash.py",),
    ),
    Bug(
        "blocks: what LS left is evicted first",
        _BLOCKS,
        "self._cached_later or self._cached",
        "self._cached or self._cached_later",
        _BOOKS,
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
        "uniform(sequence.seed, sequence.generated)",
        "uniform(id(sequence), sequence.generated)",
        _SAMPLER,
    ),
    Bug(
        "executor: a layer runs once one answer is missing",
        "actors/moe/remote_backend.py",
        "        pending.missing -= 1\n",
        "        pending.missing -= 2 if pending.missing == 2 else 1\n",
        _EXECUTOR,
    ),
    Bug(
        "executor: the loss that follows is taken for the cause",
        "actors/moe/remote_backend.py",
        "lost = lost or happening.error",
        "lost = happening.error",
        _EXECUTOR,
    ),
    Bug(
        "executor: answers to a failed batch keep their memory",
        "actors/moe/remote_backend.py",
        "            packet.release()  # an answer to a batch that has failed, or no answer\n",
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
        "planner/scheduling/task_order.py",
        "return (task.priority, task.due_s, task.batch, not task.begun, *position(task))",
        "return (-task.priority, task.due_s, task.batch, not task.begun, *position(task))",
        _EXECUTOR,
    ),
    Bug(
        "steps: all pairs of one expert are one step, however many",
        "kernels/experts.py",
        "piece = min(count, RUN_PAIRS) if cut else count",
        "piece = count",
        _YIELDS,
    ),
    Bug(
        "steps: all pairs of an expert that is kept in a cache are one step",
        "models/experts/cached_sum.py",
        "counts[0] = min(RUN_PAIRS, left)",
        "counts[0] = left",
        _SUMS,
    ),
    Bug(
        "steps: an expert of which pairs are left is done with",
        "models/experts/cached_sum.py",
        "cache.put_back(want, taken)",
        "cache.done(want, taken)",
        _SUMS,
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
)
