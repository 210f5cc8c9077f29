"""Texts on which routing is foretold, as tokens with the experts of the bundled model: those that
profile, rows of the same sets held out, and others.

A is the router before attention: of layer l it sees the residual after layer l - 1, of the first
layer the embedding, and so nothing but the token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.offloaded_decode import Model
from models.experts.expert_store import ResidentStore
from models.prediction.path_sample import RoutingPaths
from models.prediction.signals import predicted_routing_after
from models.prediction.text_runner import LayerActivations, Rows, TextRunner, batches
from training.bundled.tasks import TASKS, prompt_of, raw_rows, read_rows

ROW_TOKENS = 512
PROFILE, HELD_OUT = "profile", "held out"


class RoutedTokens(NamedTuple):
    """early_PLK: by A, the likeliest first. texts: how many."""

    tokens: RoutingPaths
    early_PLK: NDArray[np.int16]
    texts: int


def sources(data: Path, each_tokens: int) -> Iterator[tuple[str, list[tuple[list[str], int]]]]:
    """Names, and lists of texts with the tokens wanted of each. Of the classification sets as
    served, so many for the profile, three fifths of that held out."""
    for name, split, tokens in (
        (PROFILE, "train", each_tokens),
        (HELD_OUT, "test", each_tokens * 3 // 5),
    ):
        rows = [[prompt_of(task, row) for row in read_rows(task, data, split)] for task in TASKS]
        yield name, [(texts, tokens) for texts in rows]
    written: dict[str, tuple[str, Callable[[dict[str, str]], str]]] = {
        "GSM8K": ("generation/gsm8k_test.jsonl", lambda row: f"{row['question']}\n{row['answer']}"),
        "HumanEval": (
            "generation/humaneval.jsonl",
            lambda row: row["prompt"] + row["canonical_solution"],
        ),
        "AG News": ("classification/ag_news.jsonl.gz", lambda row: row["text"]),
        "BoolQ": ("classification/boolq.jsonl.gz", lambda row: row["prefix"] + row["text"]),
    }
    for name, (file, text_of) in written.items():
        yield name, [([text_of(row) for row in raw_rows(data / file)], each_tokens * 7 // 5)]


def token_rows(model: Model, parts: Iterable[tuple[list[str], int]], seed: int) -> Rows:
    """So many tokens of each list of texts, drawn at random."""
    rows: list[list[int]] = []
    for texts, most in parts:
        random.Random(seed).shuffle(texts)
        tokens = 0
        for text in texts:
            ids = model.tokenizer.encode(text)[:ROW_TOKENS]
            if len(ids) > 1:
                rows.append(ids)
                tokens += len(ids)
            if tokens >= most:
                break
    return rows


def routed(model: Model, rows: Rows) -> RoutedTokens:
    half, layers = model.half, model.spec.moe_layers
    following = dict(itertools.pairwise(layers))
    ids: list[NDArray[np.int32]] = []
    paths: list[list[torch.Tensor]] = []
    early: list[list[torch.Tensor]] = []

    def visit(seen: LayerActivations) -> None:
        if seen.layer == layers[0]:
            ids.append(seen.ids_T2.numpy().astype(np.int32))
            paths.append([])
            early.append([_by_embedding(model, seen.ids_T2[:, 0])])
        paths[-1].append(seen.routed.topk_ids_TK)
        if seen.layer in following:
            after = following[seen.layer]
            found = predicted_routing_after(half, None, seen.layer, after, seen.after_TD)
            early[-1].append(found.topk_ids_TK)

    run = TextRunner(half, ResidentStore(model.experts))
    with torch.inference_mode():
        for batch in batches(rows):
            run.run(batch, visit)
    return RoutedTokens(
        RoutingPaths(np.concatenate(ids), _stacked(paths)), _stacked(early), len(rows)
    )


def _by_embedding(model: Model, ids_T: torch.Tensor) -> torch.Tensor:
    first = model.spec.moe_layers[0]
    router = model.half.router(first)
    assert router is not None
    return router(model.half.mlp_input(first, model.half.embedding[ids_T])).topk_ids_TK


def _stacked(batches_: list[list[torch.Tensor]]) -> NDArray[np.int16]:
    whole = [torch.stack(layers, 1).numpy().astype(np.int16) for layers in batches_]
    stacked: NDArray[np.int16] = np.concatenate(whole)
    return stacked
