"""The examples of docs/adding run: each page's Python blocks are one module, and the tests among
them are collected here as this file's own."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.architecture.support import ROOT

PAGES = sorted(path for path in (ROOT / "docs/adding").glob("*.md") if path.stem != "README")
MAX_POLICY_LINES = 30

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path) -> list[str]:
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def module_of(page: Path) -> ModuleType:
    """All blocks of the page, run from top to bottom, each on the lines that it has there."""
    module = ModuleType(f"docs_adding_{page.stem}")
    sys.modules[module.__name__] = module
    whole = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(whole):
        padding = "\n" * (whole[: block.start()].count("\n") + 1)
        exec(compile(padding + block[1], str(page), "exec"), vars(module))
    return module


def collected_from(page: Path) -> dict[str, Callable[..., Any]]:
    return {
        f"test_{page.stem}_{name.removeprefix('test_')}": value
        for name, value in vars(module_of(page)).items()
        if name.startswith("test_")
    }


for _page in PAGES:
    globals().update(collected_from(_page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_has_a_test_and_ends_with_the_places_that_it_touches(page: Path) -> None:
    assert any(name.startswith(f"test_{page.stem}_") for name in globals())
    *_, last = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert last.startswith("Places touched\n")
    assert "```" not in last


def test_a_policy_takes_at_most_thirty_lines() -> None:
    policy, *_ = blocks_of(ROOT / "docs/adding/policy.md")
    assert len(policy.splitlines()) <= MAX_POLICY_LINES
