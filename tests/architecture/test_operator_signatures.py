"""Device operators that the product calls, against the packages that are installed.

Names, numbers of arguments and keywords are read from the source, since nothing calls them without
a GPU."""

import ast
import functools
import importlib
import inspect
from typing import Any, NamedTuple

import pytest
import torch

from tests.architecture.budgets import python_files


class Call(NamedTuple):
    """given: number of positional arguments."""

    name: str
    given: int
    keywords: frozenset[str]


@functools.cache
def all_calls() -> list[Call]:
    """Return the calls of methods and of functions in modules, without unpacked arguments."""
    return [
        Call(ast.unparse(node.func), len(node.args), frozenset(str(k.arg) for k in node.keywords))
        for path in python_files(("kernels", "models", "actors"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if not any(isinstance(each, ast.Starred) for each in node.args)
    ]


def test_calls_of_torch_operators_fit_their_schemas() -> None:
    calls = [call for call in all_calls() if call.name.startswith("torch.ops.")]
    assert "torch.ops.aten._flash_attention_forward" in {call.name for call in calls}
    for call in calls:
        name = call.name.removeprefix("torch.ops.").removesuffix(".default")
        operator: Any = functools.reduce(getattr, name.split("."), torch.ops)
        arguments = operator.default._schema.arguments
        given = {each.name for each in arguments[: call.given] if not each.kwarg_only}
        assert len(given) == call.given, call
        assert call.keywords <= {each.name for each in arguments} - given, call
        required = {each.name for each in arguments if not each.has_default_value()}
        assert required <= given | call.keywords, call


def test_grouped_product_takes_our_arguments() -> None:
    (call,) = [call for call in all_calls() if call.name == "functional.grouped_mm"]
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no grouped_mm; 2.10 has")
    signature = inspect.signature(torch.nn.functional.grouped_mm)
    signature.bind(*range(call.given), **dict.fromkeys(call.keywords))


@pytest.mark.parametrize(
    ("prefix", "module", "owner"),
    [
        ("nccl.", "cupy.cuda.nccl", ""),
        ("self._runtime.", "cupy.cuda.runtime", ""),
        ("lane.communicator.", "cupy.cuda.nccl", "NcclCommunicator"),
    ],
)
def test_cupy_has_what_channels_call(prefix: str, module: str, owner: str) -> None:
    names = [call.name for call in all_calls()]
    wanted = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    assert wanted
    try:
        installed = importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"cupy is not installed: {error}")
    installed = getattr(installed, owner) if owner else installed
    assert not [each for each in wanted if not hasattr(installed, each)]
