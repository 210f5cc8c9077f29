"""The bundled checkpoint's card equals what training would write."""

from pathlib import Path

import pytest

CARD = Path(__file__).resolve().parents[3] / "models" / "bundled" / "README.md"


@pytest.mark.parametrize("section", ["USE", "UCI_NOTE", "ROUTING_FILE"])
def test_card_section_equals_the_code(section: str) -> None:
    from training.bundled import card  # imports models of transformers: 6 s

    assert getattr(card, section) in CARD.read_text(encoding="utf-8")
