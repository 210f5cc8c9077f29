"""Siblings that diverge inside a block: shared tokens and homes."""

from hypothesis import given
from hypothesis import strategies as st

from contracts.requests import chain_hashes
from contracts.routing_messages import Prompt, RequestKey
from planner.routing.backlog import Backlog, HeldRequest, Lane
from planner.routing.prefix_index import MAX_HEADS, STEP_TOKENS, BlockHeadIndex, block_head_keys
from planner.routing.router import Router, RouterConfig
from planner.routing.worker_state import SaturationConfig
from tests.support.routing import quadratic_work

WORKERS = 3
BLOCK = 16
blocks = st.lists(st.integers(0, 1), max_size=BLOCK)
parents = st.sampled_from([b"", b"parent"])


@given(
    st.lists(st.tuples(st.integers(0, WORKERS - 1), parents, blocks), max_size=12), parents, blocks
)
def test_shared_tokens_are_those_of_the_most_similar_block_in_steps(
    noted: list[tuple[int, bytes, list[int]]], parent: bytes, tokens: list[int]
) -> None:
    heads = BlockHeadIndex()
    expected: dict[int, int] = {}
    for worker, other, block in noted:
        heads.note(worker, block_head_keys(other, block))
        if other == parent:
            pairs = zip(tokens, block, strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            common = min(len(tokens), len(block)) if common is None else common
            expected[worker] = max(expected.get(worker, 0), common - common % STEP_TOKENS)
    expected = {worker: common for worker, common in expected.items() if common}
    assert heads.shared_tokens(block_head_keys(parent, tokens)) == expected


def test_latest_heads_are_remembered() -> None:
    heads = BlockHeadIndex()
    for number in range(MAX_HEADS + 1):
        heads.note(0, block_head_keys(b"", [number] * STEP_TOKENS))
    shared = [
        heads.shared_tokens(block_head_keys(b"", [n] * STEP_TOKENS)) for n in (0, 1, MAX_HEADS)
    ]
    assert shared == [{}, {0: STEP_TOKENS}, {0: STEP_TOKENS}]


def homes(rows: list[list[int]], *, with_tokens: bool) -> list[int]:
    saturation = SaturationConfig(fallback_prompts=(1,), pinned=1 << 40)
    config = RouterConfig(workers=WORKERS, saturation=saturation, block_tokens=BLOCK)
    router = Router(config, quadratic_work)
    backlog = Backlog(router, quadratic_work)
    found = []
    for number, tokens in enumerate(rows):
        hashes = tuple(chain_hashes(tokens, BLOCK))
        prompt = Prompt(RequestKey(0, number), len(tokens), hashes)
        backlog.put(HeldRequest(prompt, Lane.LATER, token_ids=tokens if with_tokens else ()))
        found += [release.worker for release in backlog.take()]
    return found


def test_siblings_that_diverge_inside_a_block_have_one_home() -> None:
    rows = [[n // 2] * 8 + [1000 + n] * (12 + n % 3) for n in range(60)]
    apart, together = (homes(rows, with_tokens=known) for known in (False, True))
    assert any(one != other for one, other in zip(apart[::2], apart[1::2], strict=True))
    assert together[::2] == together[1::2]
    assert min(together.count(worker) for worker in range(WORKERS)) >= 12


def test_few_common_tokens_do_not_group_long_prompts() -> None:
    rows = [[7] * 12 + [1000 + number] * 388 for number in range(2 * WORKERS)]
    found = homes(rows, with_tokens=True)
    assert [found.count(worker) for worker in range(WORKERS)] == [2] * WORKERS
