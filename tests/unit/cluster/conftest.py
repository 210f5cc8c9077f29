"""What the tests of the API and of its front share."""

from pathlib import Path

import pytest

from tests.support.tiny_tokenizer import write_byte_level


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a byte-level tokenizer; nobody writes to it."""
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))
