"""Mutation score of the pure packages, by operators of cosmic-ray.

    python -m benchmarks.mutation --mutants 100             a random sample of all mutants
    python -m benchmarks.mutation --mutants 100 --source DIR    of another checkout
    python -m benchmarks.mutation --bugs                    the protocol bugs of bugs.json

A mutant is killed when a test of the files that import its module fails. Needs cosmic-ray (extra
`bench`). The result lists the survivors: a baseline to compare with.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.harness import Result, write_result
from benchmarks.mutation.runner import ROOT, Tree

BUGS = Path(__file__).with_name("bugs.json")
PACKAGES = ("planner",)
TESTS = ("tests/unit/planner", "tests/property")
OPERATORS = (
    *("ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add"),
    *("ReplaceBinaryOperator_Mul_Div", "ReplaceBinaryOperator_Div_Mul"),
    *("ReplaceComparisonOperator_Lt_LtE", "ReplaceComparisonOperator_LtE_Lt"),
    *("ReplaceComparisonOperator_Gt_GtE", "ReplaceComparisonOperator_GtE_Gt"),
    *("ReplaceComparisonOperator_Eq_NotEq", "ReplaceComparisonOperator_NotEq_Eq"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("AddNot", "NumberReplacer", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
)


class PlantedBug(msgspec.Struct, frozen=True):
    """`old` occurs once in `file`; a test of `tests` must fail when it is `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


class Mutant(NamedTuple):
    """One occurrence of an operator in a file."""

    file: str
    operator: str
    occurrence: int
    line: int


def main() -> int:
    """Return 1 if a planted bug survives."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Tree(Path(folder), options.source)
        return _plant_bugs(tree, options) if options.bugs else _run_mutants(tree, options)


def read_bugs() -> list[PlantedBug]:
    return msgspec.json.decode(BUGS.read_bytes(), type=list[PlantedBug])


def _plant_bugs(tree: Tree, options: argparse.Namespace) -> int:
    survivors = []
    for bug in read_bugs():
        text = (tree.root / bug.file).read_text(encoding="utf-8")
        if text.count(bug.old) != 1:
            raise SystemExit(f"{bug.name}: {bug.file} has changed, change {BUGS.name}")
        is_caught = tree.fails_with(bug.file, text.replace(bug.old, bug.new), bug.tests)
        print(f"{'caught' if is_caught else 'SURVIVED':9} {bug.name}", flush=True)
        survivors += [] if is_caught else [bug.name]
    summary = {"bugs": len(read_bugs()), "survivors": survivors}
    _write("planted_bugs", summary, options)
    return 1 if survivors else 0


def _run_mutants(tree: Tree, options: argparse.Namespace) -> int:
    tests = {file: tests_of(tree.root, file) for file in _modules(tree.root)}
    everything = [mutant for file in sorted(tests) for mutant in mutants_of(tree.root, file)]
    sample = random.Random(options.seed).sample(everything, min(options.mutants, len(everything)))
    survivors = []
    for number, mutant in enumerate(sample, 1):
        files = tests[mutant.file]
        is_killed = bool(files) and tree.fails_with(mutant.file, mutated(tree.root, mutant), files)
        label = f"{mutant.file}:{mutant.line} {mutant.operator}"
        survivors += [] if is_killed else [label]
        print(f"{number}/{len(sample)} {'killed' if is_killed else 'SURVIVED'} {label}", flush=True)
    score = 1 - len(survivors) / len(sample)
    print(f"mutation score {score:.1%} of {len(sample)} of {len(everything)} mutants")
    _write("mutation", {"mutants": len(sample), "score": score, "survivors": survivors}, options)
    return 0


def _write(name: str, summary: dict[str, object], options: argparse.Namespace) -> None:
    settings = {"mutants": options.mutants, "seed": options.seed}
    result = Result(name=name, kind="measured", settings=settings, samples={}, summary=summary)
    print(f"written: {write_result(result, options.output)}")


def _modules(root: Path) -> list[str]:
    found = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    return [str(path.relative_to(root)) for path in found if path.name != "__init__.py"]


def tests_of(root: Path, file: str) -> list[str]:
    """Return the test files that import the module."""
    module = file.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    wanted = (f"from {module} import", f"from {package} import {name}", f"import {module}\n")
    paths = [path for folder in TESTS for path in sorted((root / folder).rglob("test_*.py"))]
    return [
        str(path.relative_to(root))
        for path in paths
        if any(line in path.read_text(encoding="utf-8") for line in wanted)
    ]


def mutants_of(root: Path, file: str) -> Iterator[Mutant]:
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator

    nodes = list(ast_nodes(get_ast_from_path(root / file)))
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        positions = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, (line, _) in enumerate(positions):
            yield Mutant(file, name, occurrence, line)


def mutated(root: Path, mutant: Mutant) -> str:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    code = (root / mutant.file).read_text(encoding="utf-8")
    operator = get_operator(f"core/{mutant.operator}")()
    changed = mutate_code(code, operator, mutant.occurrence)
    return code if changed is None else str(changed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=100, help="size of the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", type=Path, default=ROOT, help="the checkout to test")
    parser.add_argument("--bugs", action="store_true", help="plant the bugs of bugs.json")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
