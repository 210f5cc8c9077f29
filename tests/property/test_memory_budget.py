"""The memory budget balances for any sequence of operations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.http.cost import STEP_BYTES, MemoryAccount, MemoryBudget
from contracts.config import LimitsConfig
from contracts.errors import OverloadError, TooCostlyError

LIMITS = LimitsConfig(open_bytes=10 * STEP_BYTES, request_fraction=0.3)
Operation = tuple[str, int, int]
operations = st.lists(
    st.tuples(
        st.sampled_from(["open", "charge", "grow", "release", "close"]),
        st.integers(0, 7),
        st.integers(0, 5 * STEP_BYTES),
    ),
    max_size=60,
)


def apply(accounts: list[MemoryAccount], budget: MemoryBudget, operation: Operation) -> None:
    what, which, count = operation
    if what == "open" or not accounts:
        accounts.append(budget.open())
        return
    account = accounts[which % len(accounts)]
    before = account.held_bytes, budget.held_bytes
    try:
        if what == "close":
            account.close()
        else:
            getattr(account, what)(count)
    except TooCostlyError:
        assert before[0] + count > LIMITS.request_bytes - STEP_BYTES
        assert (account.held_bytes, budget.held_bytes) == before
    except OverloadError:
        assert before[1] + count > LIMITS.open_bytes - STEP_BYTES
        assert (account.held_bytes, budget.held_bytes) == before


@given(wanted=operations)
def test_held_memory_is_sum_of_accounts_within_limits(wanted: list[Operation]) -> None:
    budget, accounts = MemoryBudget(LIMITS), list[MemoryAccount]()
    for operation in wanted:
        apply(accounts, budget, operation)
        assert budget.held_bytes == sum(account.held_bytes for account in accounts)
        assert budget.held_bytes <= LIMITS.open_bytes
        assert all(0 <= account.held_bytes <= LIMITS.request_bytes for account in accounts)
    for account in accounts:
        account.close()
        account.charge(1)  # a thread's late piece would never be released
    assert budget.held_bytes == 0


def test_share_of_request_and_of_best_effort_and_full_budget() -> None:
    budget = MemoryBudget(LIMITS)
    with pytest.raises(TooCostlyError, match="196609 bytes, one may hold 196608"):
        budget.open().charge(LIMITS.request_bytes + 1, "prompt")
    for _ in range(3):
        budget.open().charge(LIMITS.request_bytes)
    with pytest.raises(OverloadError, match=r"limits\.open_bytes"):
        budget.open().charge(2 * STEP_BYTES)
    budget = MemoryBudget(LIMITS)
    accounts = [budget.open() for _ in range(9)]
    for account in accounts[:8]:
        account.best_effort = True
    for account in accounts[:7]:
        account.charge(LIMITS.open_bytes // 10)
    with pytest.raises(OverloadError):
        accounts[7].charge(LIMITS.open_bytes // 10)
    accounts[8].charge(LIMITS.open_bytes // 10)
