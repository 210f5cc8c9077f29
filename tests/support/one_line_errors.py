"""Errors as users get them: one line that names what is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.cli.main import main


@contextmanager
def one_line_error(kind: type[Exception], *parts: str, start: str = "") -> Iterator[None]:
    """Expect an error whose message is one line with each of `parts`."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert message.startswith(start)
    assert "\n" not in message
    for part in parts:
        assert part in message


def error_line(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
    """Return the one line that the command prints when it fails."""
    capsys.readouterr()
    assert main([command, *arguments]) == 2
    return printed_error(capsys, command)


def printed_error(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """Return the one line that a failed command has printed."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert err.startswith(f"tandem {command}: ")
    return err
