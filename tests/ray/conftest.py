"""One Ray cluster for the modules of this folder, each with an application of its own.

Modules with a cluster of their own (adoption, two nodes, `serve deploy`, the documented commands)
do not use these fixtures.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.http.server import free_port
from tests.support.ray_head import RayHead, ray_head


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run modules with processes of their own, then those of the shared cluster, then the others.

    After a local cluster Serve's handles in this process reach no application of another one.
    """

    def order(item: pytest.Item) -> tuple[bool, bool]:
        has_local = hasattr(getattr(item, "module", None), "own_ray")
        return has_local, "ray_cluster" in getattr(item, "fixturenames", ())

    items.sort(key=order)


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[RayHead]:
    with ray_head() as head:
        yield head


@pytest.fixture(scope="module")
def app_settings(
    ray_cluster: RayHead, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """Settings of the module's application: cluster, name and a free port."""
    name = Path(request.path).stem.removeprefix("test_").replace("_", "-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield [
            f"groups.address={ray_cluster.address}",
            f"serve.name={name}",
            f"http.port={free_port()}",
        ]
