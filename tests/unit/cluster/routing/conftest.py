"""Short periods of discovery, for the tests of routing."""

import pytest


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    for period in ("SEARCH_PERIOD_S", "POLL_PERIOD_S"):
        monkeypatch.setattr(f"cluster.routing.rank_set.{period}", 0.001)
