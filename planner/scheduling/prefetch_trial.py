"""Value of prefetching an expert that may not be needed."""


def pays(precision: float, hidden_s: float, wait_s: float) -> bool:
    """Return True if the expected gain of a right prediction exceeds the cost of a wrong one
    (contracts/expert_eviction.py)."""
    return precision * hidden_s > (1.0 - precision) * wait_s
