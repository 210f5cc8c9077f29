"""A model of a few layers, and what it generates undisturbed (float32)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.known_streams import PROMPTS, TOKENS
from tests.support.local_model import LocalModel


@pytest.fixture(scope="session")
def deep(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("qwen3_moe", num_hidden_layers=4, num_experts=8)


@pytest.fixture(scope="session")
def right(deep: Path) -> list[list[int]]:
    local = LocalModel.load(deep, dtype="float32")
    return [local.greedy(prompt, TOKENS) for prompt in PROMPTS]
