"""The public interface equals its golden files."""

import pytest

from tests.architecture.golden_files import GOLDEN, golden_files


@pytest.mark.parametrize("name", ["openapi.json", "metrics.txt", "help.txt"])
def test_public_interface_equals_golden_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    expected = (GOLDEN / name).read_text(encoding="utf-8")
    assert golden_files()[name] == expected, (
        "the public interface changed; if intended: python -m tests.architecture.golden_files"
    )
