"""Generations whose tokens are known: what streams through a group are compared with."""

from __future__ import annotations

from tests.support.tiny_models import prompts

PROMPTS = prompts(7, [20, 31, 9])
TOKENS = 24
