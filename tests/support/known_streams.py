"""Generations with known tokens, to compare streams with."""

from __future__ import annotations

from tests.support.tiny_models import prompts

PROMPTS = prompts(7, [20, 31, 9])
TOKENS = 24
