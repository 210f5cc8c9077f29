"""The application of `serve deploy`: settings as under `tandem serve`, or a line; without Ray."""

from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from cluster.serving.settings import KEY_VARIABLE, with_environment
from contracts.config import TandemConfig
from contracts.errors import ConfigError
from deploy.app import WITHOUT_EFFECT, build, check_options
from tests.support.one_line_errors import one_line_error


def built(args: dict[str, Any]) -> TandemConfig:
    config = build(args)._bound_deployment.init_args[0]
    assert isinstance(config, TandemConfig)
    return config


def test_environment_key_is_used_without_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not built({}).http.has_keys
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert built({}).http.api_keys == ["secret"]
    assert built({"http": {"api_keys": ["one"]}}).http.api_keys == ["one"]
    replica = with_environment(TandemConfig(), {KEY_VARIABLE: "head"}, "My_app.2")
    assert (replica.http.api_keys, replica.serve.name) == (["head"], "My_app.2")


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name.partition(".")[0]: {name.partition(".")[2]: 1}}, name) for name in WITHOUT_EFFECT),
    ({"http": {"front": "direct"}}, "http.front=direct"),
    ({"model": {"path": "/no/such/folder"}}, "model.path=/no/such/folder: no such folder"),
    ({"groups": {"expert_ranks": 99}}, "groups.expert_ranks=99"),
    ({"kv": {"pool_token": 1}}, "pool_token"),
    ({"http": {"keys_file": "/no/such/file"}}, "/no/such/file"),
]


@pytest.mark.parametrize(("args", "part"), REFUSED, ids=[part for _, part in REFUSED])
def test_argument_that_cannot_work_is_one_line(args: dict[str, Any], part: str) -> None:
    with one_line_error(RayServeException, part):
        build(args)


@pytest.mark.parametrize(
    ("deployment", "name", "value"),
    [
        ("Groups", "num_replicas", 2),
        ("Groups", "num_replicas", "auto"),
        ("Ingress", "user_config", {}),
    ],
)
def test_option_that_cannot_work_is_refused_by_name(
    deployment: str, name: str, value: object
) -> None:
    check_options({"name": "Groups", "num_replicas": 1, "ray_actor_options": {"num_cpus": 1}})
    check_options({"name": "Ingress", "num_replicas": "auto", "max_ongoing_requests": 5})
    with pytest.raises(ConfigError, match=f"{deployment}.{name}="):
        check_options({"name": deployment, name: value})


@pytest.mark.parametrize("name", ["a/b", "", "two words", "x" * 41, "-a"])
def test_name_that_other_names_could_begin_with_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="applications: name="):
        with_environment(TandemConfig(), {}, name)
