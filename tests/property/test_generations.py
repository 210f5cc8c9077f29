"""Placement generations: both ends of the protocol on a simulated wire, with faults."""

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rebalance.placement_generations import AttentionGenerations
from tests.support.simulated_generations import DEADLINE_S, Faults, World, proposal, settled

chances = st.sampled_from((0.0, 0.1, 0.4))
faults = st.builds(
    Faults,
    load_fails=chances,
    load_late=chances,
    proposal_lost=chances,
    placement_mismatch=st.sampled_from((0.0, 0.0, 0.2)),
    deaths=st.integers(0, 2),
    expert_dies=st.sampled_from((False, False, False, True)),
    impatient=st.booleans(),
    resizes=st.sampled_from((0.0, 0.0, 0.5)),
)
worlds = st.builds(
    World,
    seed=st.integers(0, 1 << 32),
    experts=st.integers(1, 4),
    attentions=st.integers(1, 4),
    proposals=st.integers(1, 12),
    faults=faults,
)


@settings(max_examples=120)
@given(world=worlds)
def test_tokens_only_reach_ranks_with_their_generation_and_all_converge(world: World) -> None:
    world.run()
    assert not settled(world)


@given(seed=st.integers(0, 1 << 32), attentions=st.integers(1, 4))
def test_without_faults_every_rank_switches_to_the_proposal(seed: int, attentions: int) -> None:
    world = World(seed, 3, attentions, 1, Faults())
    world.run()
    assert not settled(world)
    assert world.switches == attentions
    assert {expert.machine.current.generation for expert in world.experts.values()} == {1}


def test_smaller_generation_waits_for_departing_ranks() -> None:
    smaller, attention = proposal(1, 2), AttentionGenerations(proposal(0, 3), DEADLINE_S)
    for expert in ("expert-0", "expert-1"):
        attention.prepared(expert, smaller, 0, 0.0)
    assert attention.generation == 0
    attention.prepared("expert-2", smaller, 0, 0.0)
    assert attention.generation == 1


def test_simulated_faults_reach_every_outcome() -> None:
    mixed = Faults(0.1, 0.1, 0.1, 0.1, 1, impatient=True)
    reasons, switches, again = set(), 0, 0
    for seed in range(60):
        world = World(seed, 3, 3, 8, mixed)
        world.run()
        assert not settled(world)
        switches += world.switches
        again += world.placed_again
        for expert in world.experts.values():
            reasons |= {report.reason for report in expert.reports}
    assert switches > 100
    assert again > 0
    parts = "cannot read|not there within|refused it|another placement|no word of|is under way"
    for part in f"{parts}|is not newer|has refused generation".split("|"):
        assert any(part in reason for reason in reasons), part
