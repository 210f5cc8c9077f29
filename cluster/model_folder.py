"""From `model.path` to a folder."""

from __future__ import annotations

from pathlib import Path

import models
from contracts.config import BUNDLED
from contracts.errors import CheckpointError


def resolve_model_folder(path: str) -> Path:
    """The checkpoint folder that `model.path` names; "bundled" is the one in the package.

    Raises CheckpointError if it is not a folder.
    """
    folder = Path(models.__path__[0]) / BUNDLED if path == BUNDLED else Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(
            f"model.path={path}: no such folder; give a Hugging Face model folder"
        )
    return folder.resolve()
