"""What a request may ask of the sampler, in any combination."""

from hypothesis import strategies as st

from contracts.requests import Sampling

VOCABULARY = 12


@st.composite
def requests(draw: st.DrawFn) -> tuple[Sampling, list[int]]:
    """Fields, and a prompt."""
    some = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=3)
    choices = st.one_of(st.none(), st.none(), st.lists(some, min_size=1, max_size=4))
    biases = st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-5, 5), max_size=4)
    picked = draw(choices)
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 0.05])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 50])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 0.6, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.8, -0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7, 5.0])),
        logit_bias=draw(st.one_of(st.none(), biases)),
        min_tokens=draw(st.integers(0, 3)) if picked is None else 0,
        stop_token_ids=draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2)),
        ignore_eos=draw(st.booleans()),
        choices=picked,
        seed=draw(st.integers(0, 99)),
        max_tokens=50,
    )
    return sampling, draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6))
