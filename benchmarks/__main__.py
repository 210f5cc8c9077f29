"""Command line of the benchmarks: `python -m benchmarks NAME [OPTIONS]`, `--list`, `--page`."""

import importlib
import sys
from collections.abc import Sequence

from benchmarks.harness import Case, run_case
from benchmarks.page import PAGE, build_page

# Modules of benchmarks/cases/, in the order of the results page.
CASES = (
    *("machine", "engines", "prefill_beside_transformers", "beside_checkout", "http_overhead"),
    *("time_to_ready", "channels", "device_model", "planned_overlap", "solve_time"),
    *("router_decision", "router_simulation", "priorities_paper", "stored_experts"),
    *("offloaded_decode", "placement", "shared_batches", "shared_load", "mode_choice"),
    *("bulk_kills", "lm_eval_check", "slot_kernels", "offloaded_on_gpu"),
    "streamed_on_gpu",
)
_USAGE = """usage: python -m benchmarks NAME [OPTIONS]   run one benchmark; --help lists its options
       python -m benchmarks --list           names and questions
       python -m benchmarks --page           rebuild docs/results.md from benchmarks/results/
"""


def load(name: str) -> Case:
    """Import the module of a case."""
    case: Case = importlib.import_module(f"benchmarks.cases.{name}").CASE
    return case


def main(arguments: Sequence[str]) -> int:
    """Return the exit status."""
    name, *rest = arguments or ["--help"]
    if name == "--list":
        for each in CASES:
            print(f"{each:28} {load(each).question}")
    elif name == "--page":
        PAGE.write_text(build_page([load(each) for each in CASES]), encoding="utf-8")
    elif name in CASES:
        run_case(load(name), rest)
    else:
        print(_USAGE, end="", file=sys.stderr)
        return 0 if name == "--help" else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
