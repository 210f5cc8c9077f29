"""matplotlib, which is in the `bench` extra only, and one-line errors of writing its pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")


def pyplot(option: str) -> Any:
    """matplotlib.pyplot without a display. Raises ConfigError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            f"{option}: needs matplotlib: in a clone, pip install -e '.[bench]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


@contextmanager
def saved(figure: Any, path: Path, option: str) -> Iterator[None]:
    """Inside: draw. Then the figure is written and closed. Raises ConfigError."""
    check_format(path, option)
    try:
        yield
        figure.tight_layout()
        figure.savefig(path, dpi=150, facecolor="white")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None


def check_format(path: Path, option: str) -> None:
    """Raises ConfigError for a name that does not end in a known picture format."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{option} {path}: end its name in one of {', '.join(FORMATS)}")
