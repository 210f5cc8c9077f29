"""Rules for all code: imports, environment, logging, decoders, errors."""

import ast
import importlib.metadata
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cluster.http.errors  # noqa: F401 - its errors count too
import kernels
from contracts.errors import OverloadError, PeerError, RankError, RequestError, TandemError
from tests.architecture.support import ROOT, modules

# Where a process begins: these may look at the environment, everything below is told. oneDNN asks
# the environment alone, in the process that computes.
ENTRY_POINTS = {
    "actors/ranks/serving_rank.py",
    "cluster/cli/main.py",
    "cluster/serving/batch_actor.py",
    "deploy/app.py",
    "cluster/serving/ray_session.py",
    "cluster/serving/serve_app.py",
    "cluster/serving/server.py",
}


def test_imports_follow_the_layers() -> None:
    # In a process of its own: it sets up logging, and with that turns off every logger there is.
    tool = Path(sys.executable).parent / "lint-imports"
    run = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_processes_without_tensors_load_neither_torch_nor_numba() -> None:
    """Launcher, Groups, Ingress and planner: with both, each needs 3 more seconds of a core."""
    code = "import cluster.serving.server, actors.ranks.planner_rank, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert not {"torch", "numba", "llvmlite"} & {*loaded.stdout.decode().split()}


def test_only_entry_points_read_the_environment() -> None:
    readers = {name for name, tree in modules().items() if any(_environment_reads(tree))}
    assert readers <= ENTRY_POINTS


def test_log_records_are_events_with_fields() -> None:
    levels = {"info", "warning", "error", "critical", "exception"}
    for name, tree in modules().items():
        if name.startswith(("benchmarks/", "training/", "tests/")) or name == "contracts/logs.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                logged = (
                    ast.unparse(node.func.value) in {"log", "_LOG"} and node.func.attr in levels
                )
                assert not logged, f"{name}:{node.lineno}: use contracts.logs.event"


def test_typed_decoders_are_created_at_import() -> None:
    """msgspec crashes if two threads build the decoder of one type at the same time.

    Commands decode in one thread; the fleet store is read before the launcher has other threads.
    """
    alone = (
        "cluster/cli/",
        "cluster/observe/",
        "cluster/tools/demo.py",
        "cluster/fleet/fleet_store.py",
    )
    for name, tree in modules().items():
        if not name.startswith(alone):
            made = [f"{name}:{call.lineno}" for call in _typed_decoders(tree)]
            assert not made, f"{made}: make a Decoder beside the type"


def test_packages_re_export_nothing() -> None:
    for name, tree in modules().items():
        if name.endswith("__init__.py"):
            code = [node for node in tree.body if not _is_docstring(node)]
            assert not code, f"{name} holds more than its docstring"


def test_kernels_is_not_mistaken_for_the_pypi_package() -> None:
    """`transformers` probes for a PyPI package `kernels`, by import and by version."""
    assert not hasattr(kernels, "__version__")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


@pytest.mark.parametrize("kind", [TandemError, *TandemError.__subclasses__()])
def test_errors_pickle(kind: type[TandemError]) -> None:
    for error_type in _family(kind):
        error = error_type("what went wrong", *_more_arguments(error_type))
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is error_type
        assert (copy.args, copy.message) == (error.args, "what went wrong")
        assert vars(copy) == vars(error)
        assert (copy.code, copy.status, copy.retryable) == (
            error.code,
            error.status,
            error.retryable,
        )


def test_error_codes_are_words_and_statuses_are_errors() -> None:
    for kind in _family(TandemError):
        assert kind.code.replace("_", "").isalpha()
        assert 400 <= kind.status < 600


def _environment_reads(tree: ast.Module) -> Iterator[ast.AST]:
    names = {"environ", "getenv", "environb", "putenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                yield node
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and names & {alias.name for alias in node.names}
        ):
            yield node


def _typed_decoders(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield decoders created within functions."""
    functions = (f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef))
    for node in (node for function in functions for node in ast.walk(function)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("msgspec."):
            name = ast.unparse(node.func).rpartition(".")[2]
            typed = any(keyword.arg == "type" for keyword in node.keywords)
            if (name == "decode" and typed) or (name == "Decoder" and (node.args or typed)):
                yield node


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _family(kind: type[TandemError]) -> Iterator[type[TandemError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


def _more_arguments(kind: type[TandemError]) -> tuple[object, ...]:
    """Return the arguments after the message."""
    for base, arguments in (
        (RankError, ("some_code", 503)),
        (PeerError, ("expert-1",)),
        (OverloadError, (2.5,)),
        (RequestError, ("prompt",)),
    ):
        if issubclass(kind, base):
            return arguments
    return ()
