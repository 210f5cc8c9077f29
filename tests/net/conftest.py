"""Two nodes for the tests of this folder."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.support.two_nodes import TwoNodes, ray_nodes, two_namespaces


@pytest.fixture(scope="package")
def two_nodes() -> Iterator[TwoNodes]:
    """Two namespaces with a Ray node in each."""
    with ExitStack() as stack:
        try:
            nodes = stack.enter_context(two_namespaces())
        except RuntimeError as error:
            pytest.skip(f"no network namespaces here: {error}")
        stack.enter_context(ray_nodes(nodes))
        yield nodes
