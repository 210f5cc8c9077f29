"""The names of the tensors that are read from checkpoints."""

import pytest
import torch

from models.spec.checkpoint_files import SafetensorsFile


def record_read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that records the names of read tensors."""
    names: list[str] = []
    original = SafetensorsFile.tensor

    def spy(self: SafetensorsFile, name: str) -> torch.Tensor:
        names.append(name)
        return original(self, name)

    monkeypatch.setattr(SafetensorsFile, "tensor", spy)
    return names
