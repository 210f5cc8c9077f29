"""Random requests of a client, of which some are cancelled, beside the single-process path."""

import random
from collections.abc import Callable

import torch

from contracts.messages import Cancel
from tests.support.group_harness import RankConnection, greedy
from tests.support.local_model import LocalModel
from tests.support.tiny_models import VOCABULARY


def check_random_requests(
    chance: random.Random,
    client: RankConnection,
    local: LocalModel,
    submit: Callable[..., int],
    label: str,
) -> None:
    """Check logits and tokens of sequences with a common prefix; `submit` sends one."""
    head = [chance.randrange(1, 131) for _ in range(chance.choice([0, 20, 35]))]
    lengths = [chance.randint(1, 90) for _ in range(chance.randint(2, 8))]
    sequences = [head + [chance.randrange(1, 131) for _ in range(n)] for n in lengths]
    expected = local.last_logits(sequences)
    scored = [submit(ids, candidates=VOCABULARY) for ids in sequences]
    cancelled = [submit(ids, sampling=greedy(9)) for ids in sequences[:2]]
    generated = [submit(ids, sampling=greedy(4)) for ids in sequences]
    for request in cancelled:
        client.send(Cancel(request))
    found = client.logits(scored)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0, msg=label)
    tokens = [client.generated(request)[0] for request in generated]
    assert [row[0] for row in tokens] == expected.argmax(-1).tolist(), label
