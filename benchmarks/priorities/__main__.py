"""LS beside BE on one attention and one expert rank, variants in turns.

    python -m benchmarks.priorities mix --rounds 4 --seconds 30      (about 25 minutes)
    python -m benchmarks.priorities mix --only ours --seconds 10 --rounds 1
    python -m benchmarks.priorities paper --rounds 1 --seconds 60
    python -m benchmarks.priorities http --seconds 600 --trace AzureLLMInferenceTrace_conv_2023.csv

mix: 16 BE prompts of 512 tokens always open; LS of 64 tokens, 1 or 50 generated, at random.
paper: chats of both classes at fractions of the capacity of continuous batching.
one_class: what preemption costs where there is nothing to preempt.
starvation: LS at three times the capacity, for a minute, and what BE gets.
blocking: for how long LS can have waited for a slice of BE, by processor time.
bound: how much sooner LS's first tokens could come in the paper's run, whatever the policy.
bulk: rows of a bulk job, and LS requests of one pass, on a prefill worker and on the other ranks.
http: a trace at 1.5 times the capacity of `tandem serve`, whose refused clients come again.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from benchmarks.harness import Kind, record
from benchmarks.priorities import (
    blocking,
    bound,
    bulk,
    group,
    mix,
    one_class,
    over_http,
    paper,
    starvation,
)

PARTS = {
    "mix": mix,
    "paper": paper,
    "one_class": one_class,
    "starvation": starvation,
    "blocking": blocking,
    "bound": bound,
    "bulk": bulk,
    "http": over_http,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a variant in a round")
    parser.add_argument(
        "--model",
        choices=group.MODELS,
        default="medium",
        help="small: a quarter of the work, for a machine without wide vectors",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", default="", help="variants whose name contains this|or this")
    parser.add_argument("--picture", type=Path, help="paper: its Figures 2 to 4 (.svg, .png)")
    parser.add_argument("--load", default="", help="mix, paper: this alone, as '1 out'")
    parser.add_argument(
        "--capacities",
        type=float,
        nargs="*",
        default=[],
        help="paper: jobs/s of run to completion and of iteration FCFS, if known",
    )
    parser.add_argument("--budgets", type=int, nargs="*", default=list(mix.BUDGETS))
    parser.add_argument("--trace", type=Path, help="http: a CSV of the Azure LLM inference traces")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    options = parser.parse_args()
    part = PARTS[options.part]
    samples = asyncio.run(part.run(options))
    summary = part.summary(samples)
    for name, row in summary.items():
        print(f"{name:45} {row}")
    if options.picture:
        paper.picture(summary, options.picture)
    model = group.MODELS[options.model]
    kind: Kind = "modelled" if part is bound else "measured"
    record(f"priorities_{options.part}", options, samples, summary, model, kind=kind)


if __name__ == "__main__":
    main()
