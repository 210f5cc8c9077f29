"""Expert routing of real texts by a model, for making and judging placements.

    python -m benchmarks.placement.traces --data DATA --output bundled.npz

Texts: the train and test rows of the bundled checkpoint's eight tasks. A file has, by kind of text,
`KIND_ids_P2` (token id, and the id before it, or -1) and `KIND_paths_PLK` (experts, by layer).
Shapes: P tokens, L layers, K experts.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.bundled.network import FastForward
from training.bundled.tasks import TASKS, prompt_of, read_rows

BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
BATCH_TOKENS = 4096
ROW_TOKENS = 512


class Traces(NamedTuple):
    """ids_P2: token id, and the one before it or -1. paths_PLK: experts, by layer."""

    ids_P2: NDArray[np.int32]
    paths_PLK: NDArray[np.int16]


class Recorder(FastForward):
    """Notes the routing of every layer: [T, K] each, padding too."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, torch.float32)
        self.routed: list[Tensor] = []

    def _moe(self, layer: Any, x_TD: Tensor, valid_T1: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE = functional.linear(x_TD, layer.mlp.gate.weight)
        self.routed.append(logits_TE.topk(self._config.num_experts_per_tok, -1).indices)
        return super()._moe(layer, x_TD, valid_T1)


@torch.no_grad()
def traced(model: Any, rows: Sequence[Sequence[int]]) -> Traces:
    """Of rows of token ids, in their order."""
    recorder = Recorder(model)
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
    found: dict[int, NDArray[np.int16]] = {}
    while order:
        longest = len(rows[order[-1]])
        batch = [order.pop() for _ in range(min(len(order), max(1, BATCH_TOKENS // longest)))]
        ids_BS = torch.zeros(len(batch), longest, dtype=torch.long)
        for at, row in enumerate(batch):
            ids_BS[at, : len(rows[row])] = torch.tensor(rows[row])
        recorder.routed.clear()
        recorder(ids_BS, ids_BS >= 0)
        paths = torch.stack(recorder.routed, 1).view(*ids_BS.shape, len(recorder.routed), -1)
        for at, row in enumerate(batch):
            found[row] = paths[at, : len(rows[row])].to(torch.int16).numpy()
    ids = [np.array([[i, b] for b, i in zip([-1, *r], r, strict=False)], np.int32) for r in rows]
    return Traces(np.concatenate(ids), np.concatenate([found[n] for n in range(len(rows))]))


def rows_of(data: Path, kind: str, tokenizer: Any) -> list[list[int]]:
    """Return token ids of the texts of a kind: "train" or "test"."""
    texts = _task_texts(data, kind)
    encoded = (tokenizer.encode(text, add_special_tokens=False)[:ROW_TOKENS] for text in texts)
    return [ids for ids in encoded if ids]


def _task_texts(data: Path, split: str) -> Iterator[str]:
    for task in TASKS:
        rows = read_rows(task, data, split)
        yield from (prompt_of(task, row) for row in rows[: 1200 if split == "train" else 600])


def write(path: Path, traces: dict[str, Traces]) -> None:
    arrays = {f"{kind}_ids_P2": each.ids_P2 for kind, each in traces.items()}
    paths = {f"{kind}_paths_PLK": each.paths_PLK for kind, each in traces.items()}
    np.savez_compressed(path, **arrays, **paths)  # type: ignore[arg-type]


def read(path: Path) -> dict[str, Traces]:
    """By kind of text."""
    with np.load(path, allow_pickle=False) as file:
        kinds = [name[: -len("_ids_P2")] for name in file if name.endswith("_ids_P2")]
        return {k: Traces(file[f"{k}_ids_P2"], file[f"{k}_paths_PLK"]) for k in kinds}


def all_traces(model: Any, tokenizer: Any, data: Path) -> dict[str, Traces]:
    return {k: traced(model, rows_of(data, k, tokenizer)) for k in ("train", "test")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(str(options.model), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(options.model))
    found = all_traces(model, tokenizer, options.data)
    write(options.output, found)
    print({kind: len(each.ids_P2) for kind, each in found.items()})


if __name__ == "__main__":
    main()
