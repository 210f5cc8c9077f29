"""The bundled checkpoint's card equals what training would write."""

from pathlib import Path

import pytest

from training.bundled import card

CARD = Path(__file__).resolve().parents[3] / "models" / "bundled" / "README.md"


@pytest.mark.parametrize("section", [card.USE, card.UCI_NOTE, card.ROUTING_FILE])
def test_card_section_equals_the_code(section: str) -> None:
    assert section in CARD.read_text(encoding="utf-8")
