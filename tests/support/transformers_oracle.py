"""Checkpoints in `transformers`, our oracle."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class Oracle:
    """A checkpoint that `transformers` has loaded, by default in float32."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        import transformers

        if json.loads((folder / "config.json").read_text()).get("model_type") == "kimi_k2":
            options["config"] = transformers.DeepseekV3Config.from_pretrained(folder)
            options["config"].model_type = "deepseek_v3"  # all that `transformers` needs
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager", **options
        ).eval()

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return logits [T, V] of all positions."""
        with torch.no_grad():
            logits_TV: torch.Tensor = self._model(torch.tensor([[*token_ids]])).logits[0]
        return logits_TV

    def greedy_choices(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the likeliest token after the prompt, and after each of `tokens` but the last.

        Equal to `tokens` if and only if greedy decoding gives `tokens`.
        """
        logits_TV = self.logits([*prompt, *tokens[:-1]])
        choices: list[int] = logits_TV[len(prompt) - 1 :].argmax(-1).tolist()
        return choices
