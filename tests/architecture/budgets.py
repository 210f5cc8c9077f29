"""Size and language of the code base against its budgets.

    python -m tests.architecture.budgets            # the table
    python -m tests.architecture.budgets --names    # every finding, one a line

An issue that needs more lines raises the budget in the commit that needs them.
"""

import argparse
import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.architecture.support import ROOT, parse, tracked_files

PRODUCT = ("contracts", "kernels", "models", "planner", "actors", "cluster", "deploy", "dashboards")
CODE = (*PRODUCT, "benchmarks", "training", "tests")

# Words of identifiers, split at `_` and at capitals. docs/glossary.md has the term to use instead.
BANNED_WORDS = frozenset(
    """absence anybody appointment appointments ask asked asking asks attendance begun bring
    bringing brings brought came everybody foresight foretell foretells foretold hear heard hearing
    hears heart joint loan lonely loneliness mine neighbour neighbours nobody patience patient said
    say saying says somebody sought tell telling tells told took unsaid went whereabouts who
    whoever whom whose wont""".split()  # noqa: SIM905
)

# First words of a docstring that leave it a fragment.
FRAGMENT_WORDS = frozenset(
    """as at before both by for from has how in it its may nobody nothing of on per since so that
    they those to until what when where whether which who whoever whose why with without""".split()  # noqa: SIM905
)
_PHRASES = re.compile(
    r"\b(whoever|nobody|somebody|foretold|foretells?|lets? go of|goes? over to|went over"
    r"|stands? in for|what becomes of|is told|are told|tells?|told|heard|hears?"
    r"|is through with)\b",
    re.IGNORECASE,
)


class Budget(NamedTuple):
    """A measured figure and its upper bound."""

    name: str
    value: int
    limit: int


def budgets() -> list[Budget]:
    """Every budget with its present value."""
    return [
        # 63,900 without issue 30's clients (formats, tools, structured output 2,150; batches, bulk
        # tasks 2,400; bench 450; inputs 550), issue 31's operation (600; spans 250), issue 32's
        # kernels, threads, colocation 2,200, pinned ranks 105, weights as stored 670, whole passes
        # 450, direct calls 950, calls and records of a decode step 250, attention by vectors 45,
        # trials of split batches 80, issue 33's dispatch, sums, sampling and modes of devices 900,
        # channels and stage times 1,200, experts as stored, slots and gathers between nodes 850,
        # profile and KV of devices 320, issue 34's families 700, states and sparse attention 1,100,
        # issue 35's locality 400, shared batches 1,180, their tensor-parallel experts 180; a single
        # module of configuration and others merged 520 less.
        # Benchmarks: 12,350 without engines (OpenVINO 110), stored_experts, shared_batches,
        # shared_load and mode_choice 570
        Budget("product: lines", _lines(PRODUCT), 79_300),
        Budget("  of which cluster/tools and dashboards", _lines(TOOLS), 7_720),
        Budget("tests: lines", _lines(("tests",)), 56_310),
        Budget("benchmarks: lines", _lines(("benchmarks",)), 12_640),
        Budget("docs and README: words", _words(), 46_180),
        Budget("class names with two definitions", len(repeated_classes()), 0),
        Budget("identifiers with a banned word", len(banned_identifiers()), 0),
        Budget("docstrings that start with a fragment", len(fragment_docstrings()), 0),
        Budget("docstrings with a banned phrase", len(idiomatic_docstrings()), 0),
    ]


TOOLS = ("cluster/tools", "dashboards")


def python_files(folders: tuple[str, ...]) -> list[Path]:
    """Tracked Python files below any of `folders`."""
    tops = tuple(f"{folder}/" for folder in folders)
    return [
        path
        for path in tracked_files()
        if path.suffix == ".py" and path.relative_to(ROOT).as_posix().startswith(tops)
    ]


@functools.cache
def _tree(path: Path) -> ast.Module:
    return parse(path)


def _lines(folders: tuple[str, ...]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in python_files(folders))


def _words() -> int:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def repeated_classes() -> list[str]:
    """Public classes of the product that share a name with another one."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in python_files(PRODUCT):
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(_place(path, node))
    return [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def banned_identifiers() -> list[str]:
    """Defined names, in product, benchmarks and tests, that contain a word of BANNED_WORDS."""
    return [
        f"{_place(path, node)} {name}"
        for path in python_files(CODE)
        if any(map(_is_banned, re.findall(r"[A-Za-z_]\w*", path.read_text("utf-8"))))  # saves trees
        for node, name in _defined_names(_tree(path))
        if _is_banned(name)
    ]


def fragment_docstrings() -> list[str]:
    """Docstrings of the product whose first word is in FRAGMENT_WORDS."""
    return [
        f"{place} {text.splitlines()[0]}"
        for place, text in _docstrings()
        if text.split()[0].lower().strip(",.:;") in FRAGMENT_WORDS
    ]


def idiomatic_docstrings() -> list[str]:
    """Docstrings of the product that contain a phrase docs/glossary.md replaces."""
    return [
        f"{place} {found[0]}" for place, text in _docstrings() if (found := _PHRASES.search(text))
    ]


@functools.cache
def _docstrings() -> list[tuple[str, str]]:
    return [
        (_place(path, node), text)
        for path in python_files(PRODUCT)
        for node in _definitions(_tree(path))
        if (text := ast.get_docstring(node))
    ]


def _definitions(
    node: ast.AST,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield modules, classes and functions, without a look into expressions."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        statements = getattr(node, field, None)
        for child in statements if isinstance(statements, list) else ():
            yield from _definitions(child)


@functools.cache
def _is_banned(name: str) -> bool:
    return not BANNED_WORDS.isdisjoint(_split(name))


def _defined_names(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node, node.name
        elif isinstance(node, ast.arg):
            yield node, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node, node.attr


def _split(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def _place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 1)}"


def table() -> str:
    """The budgets as a table for people."""
    rows = [f"{'budget':44}{'now':>10}{'limit':>10}"]
    for budget in budgets():
        over = "  over" if budget.value > budget.limit else ""
        rows.append(f"{budget.name:44}{budget.value:10,}{budget.limit:10,}{over}")
    files = ", ".join(f"{top} {len(python_files((top,)))}" for top in CODE)
    return "\n".join([*rows, f"Python files: {files}"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the budgets and their present values.")
    parser.add_argument("--names", action="store_true", help="list every finding")
    if parser.parse_args().names:
        for found in (
            repeated_classes(),
            banned_identifiers(),
            fragment_docstrings(),
            idiomatic_docstrings(),
        ):
            sys.stdout.write("\n".join(found) + "\n")
    sys.stdout.write(table() + "\n")


if __name__ == "__main__":
    main()
