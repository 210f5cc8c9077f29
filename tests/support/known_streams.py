"""Generations with known tokens, to compare streams with."""

from tests.support.tiny_models import prompts

PROMPTS = prompts(7, [20, 31, 9])
TOKENS = 24
