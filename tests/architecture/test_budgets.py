"""The code base stays within its budgets."""

from tests.architecture.budgets import budgets, table


def test_code_base_stays_within_budgets() -> None:
    over = [budget for budget in budgets() if budget.value > budget.limit]
    assert not over, f"over budget: {over}\n{table()}"
