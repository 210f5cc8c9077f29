"""Prefill-only requests of the shared data sets and traces, as a router sees them."""

import csv
import gzip
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from contracts.requests import DIGEST_BYTES, chain_hashes
from contracts.routing_messages import Prompt, RequestKey

BLOCK_TOKENS = 16
TOKENIZER = "tokenizers/olmo_gpt-neox-dolma-v1_5.tokenizer.json"
TASKS = ("moral_stories", "mmlu", "boolq", "imdb", "quality")  # as in MoE-Prefill's Table 2
ARXIV_ROWS = 150  # documents of arXiv: 2% of the requests, a quarter of the tokens, as there

Shape = tuple[int, tuple[bytes, ...]]
"""(prompt tokens, hashes of its full blocks)."""


def workload(name: str, data: Path, seed: int) -> list[Prompt]:
    """Requests in order of arrival. Raises SystemExit for a name that is not known."""
    if name not in WORKLOADS:
        raise SystemExit(f"--workloads {name}: give some of {', '.join(WORKLOADS)}")
    shapes = WORKLOADS[name](data, seed)
    return [Prompt(RequestKey(0, i), tokens, hashes) for i, (tokens, hashes) in enumerate(shapes)]


def _mixed(data: Path, seed: int) -> list[Shape]:
    """All sets in one shuffled stream: MoE-Prefill's aggregated workload, with the rows there are.

    The lengths of arXiv documents are real, their blocks are made up: nothing is shared.
    """
    shapes = [shape for task in TASKS for shape in _rows(data, task)]
    with (data / "traces/arxiv_summarization_lengths.csv").open(encoding="utf-8") as file:
        lengths = [int(row["num_prefill_tokens"]) for row in csv.DictReader(file)]
    rng = random.Random(seed)
    picked = rng.sample(lengths, ARXIV_ROWS)
    shapes += [_unshared("arxiv", row, length) for row, length in enumerate(picked)]
    rng.shuffle(shapes)
    return shapes


def _rows(data: Path, task: str) -> Iterator[Shape]:
    """Rows of a classification set: prefix and text, in the file's order."""
    tokenizer = Tokenizer.from_file(str(data / TOKENIZER))
    plain = data / f"classification/{task}.jsonl"
    rows = _lines(plain if plain.exists() else plain.with_suffix(".jsonl.gz"))
    texts = [row.get("prefix", "") + row["text"] for row in rows]
    for encoding in tokenizer.encode_batch(texts):
        yield len(encoding.ids), tuple(chain_hashes(encoding.ids, BLOCK_TOKENS))


def _azure(path: Path) -> Iterator[Shape]:
    """Lengths only: nothing is shared."""
    with path.open(encoding="utf-8") as file:
        for row, fields in enumerate(csv.DictReader(file)):
            yield _unshared("code", row, int(fields["ContextTokens"]))


def _unshared(name: str, row: int, tokens: int) -> Shape:
    return tokens, tuple(_digest(f"{name}.{row}.{i}") for i in range(tokens // BLOCK_TOKENS))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


WORKLOADS: dict[str, Callable[[Path, int], Iterable[Shape]]] = {
    "mixed": _mixed,
    "mmlu": lambda data, seed: _rows(data, "mmlu"),
    "code": lambda data, seed: _azure(data / "traces/AzureLLMInferenceTrace_code_2023.csv"),
}
