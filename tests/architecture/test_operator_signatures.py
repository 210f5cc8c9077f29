"""Device operators that the product calls, against the packages that are installed.

Names, numbers of arguments and keywords are read from the source, since nothing calls them without
a GPU."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.architecture.budgets import python_files


class Call(NamedTuple):
    """A call with its place. given: positional arguments; None: unpacked ones."""

    name: str
    given: int | None
    keywords: frozenset[str]
    place: str


def calls(prefix: str) -> list[Call]:
    """Return the product's calls of names that start so, such as "torch.ops."."""
    return [call for call in _all_calls() if call.name.startswith(prefix)]


@functools.cache
def _all_calls() -> tuple[Call, ...]:
    return tuple(_found_calls())


def _found_calls() -> Iterator[Call]:
    for path in python_files(("kernels", "models", "actors")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                unpacked = any(isinstance(each, ast.Starred) for each in node.args)
                names = frozenset(keyword.arg or "**" for keyword in node.keywords)
                given = None if unpacked else len(node.args)
                yield Call(ast.unparse(node.func), given, names, f"{path}:{node.lineno}")


def found(root: Any, name: str) -> Any:
    for part in name.split("."):
        root = getattr(root, part)
    return root


def test_calls_of_torch_operators_fit_their_schemas() -> None:
    checked = set()
    for call in calls("torch.ops."):
        operator = found(torch.ops, call.name.removeprefix("torch.ops."))
        overload = getattr(operator, "default", operator)
        positional = [each for each in overload._schema.arguments if not each.kwarg_only]
        names = {each.name for each in overload._schema.arguments}
        required = {
            each.name for each in overload._schema.arguments if not each.has_default_value()
        }
        assert call.keywords <= names, call
        if call.given is not None:
            assert call.given <= len(positional), call
            assert required <= call.keywords | {a.name for a in positional[: call.given]}, call
        checked.add(call.name)
    assert "torch.ops.aten._flash_attention_forward" in checked


def test_grouped_product_takes_our_arguments() -> None:
    (call,) = calls("functional.grouped_mm")
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no grouped_mm; 2.10 has")
    signature = inspect.signature(torch.nn.functional.grouped_mm)
    signature.bind(*range(call.given or 0), **dict.fromkeys(call.keywords))


CUPY = {
    "nccl.": "cupy.cuda.nccl",
    "self._runtime.": "cupy.cuda.runtime",
    "lane.communicator.": "cupy.cuda.nccl:NcclCommunicator",
}


@pytest.mark.parametrize("prefix", CUPY)
def test_cupy_has_what_channels_call(prefix: str) -> None:
    wanted = {call.name.removeprefix(prefix) for call in calls(prefix)}
    if "communicator" in prefix:
        wanted |= {"send", "recv"}
    assert wanted
    module, _, name = CUPY[prefix].partition(":")
    try:
        installed = importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"cupy is not installed: {error}")
    owner = found(installed, name) if name else installed
    assert not [each for each in wanted if not hasattr(owner, each)]
