"""Eviction of unauthenticated connections."""

from __future__ import annotations

from actors.channels.pending_handshakes import MAX_PER_ADDRESS, MAX_UNPROVEN, PendingHandshakes


class Crowd:
    """Connections by name; `cut` has the evicted ones."""

    def __init__(self) -> None:
        self.gate = PendingHandshakes("rank")
        self.cut: list[str] = []
        self.numbers: dict[str, int] = {}

    def enter(self, address: str, name: str) -> None:
        self.numbers[name] = self.gate.enter(address, lambda: self.cut.append(name))

    def fill(self, address: str, count: int) -> None:
        for number in range(count):
            self.enter(address, f"{address} {number}")


def test_address_at_its_limit_loses_its_own_oldest() -> None:
    crowd = Crowd()
    crowd.enter("10.0.0.2", "other")
    crowd.fill("10.0.0.1", MAX_PER_ADDRESS)
    assert crowd.cut == []
    crowd.enter("10.0.0.1", "newest")
    assert crowd.cut == ["10.0.0.1 0"]
    assert crowd.gate.count == MAX_PER_ADDRESS + 1


def test_address_with_the_most_loses_one_when_all_slots_are_used() -> None:
    crowd = Crowd()
    crowd.enter("10.0.0.9", "early")
    crowd.fill("10.0.0.1", MAX_PER_ADDRESS)
    for number in range(MAX_UNPROVEN - MAX_PER_ADDRESS - 1):
        crowd.enter(f"10.1.0.{number}", f"one of {number}")
    assert crowd.cut == []
    crowd.enter("10.0.0.2", "newest")
    assert crowd.cut == ["10.0.0.1 0"]
    assert crowd.gate.count == MAX_UNPROVEN


def test_connections_from_many_addresses_are_bounded_in_total() -> None:
    crowd = Crowd()
    for number in range(5 * MAX_UNPROVEN):
        crowd.enter(f"10.{number}", f"{number}")
    assert crowd.gate.count == MAX_UNPROVEN
    assert crowd.cut == [f"{number}" for number in range(4 * MAX_UNPROVEN)]


def test_authenticated_peer_is_kept_and_evicted_peer_is_refused() -> None:
    crowd = Crowd()
    crowd.enter("10.0.0.1", "peer")
    assert crowd.gate.leave(crowd.numbers["peer"])
    crowd.fill("10.0.0.1", MAX_PER_ADDRESS + 1)
    assert crowd.cut == ["10.0.0.1 0"]
    assert not crowd.gate.leave(crowd.numbers["10.0.0.1 0"])
    assert crowd.gate.leave(crowd.numbers["10.0.0.1 1"])
    assert crowd.gate.count == MAX_PER_ADDRESS - 1


def test_addresses_without_connections_are_forgotten() -> None:
    crowd = Crowd()
    for number in range(1000):
        crowd.enter(f"10.{number}", f"{number}")
        crowd.gate.leave(crowd.numbers[f"{number}"])
    assert not crowd.gate._per_address
