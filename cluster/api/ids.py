"""Names for requests and answers, each another one."""

from __future__ import annotations

import random
import secrets

_bits = random.Random(secrets.randbits(256))  # they keep no secret: a system call each is too much


def fresh_id() -> str:
    """32 hexadecimal digits."""
    return f"{_bits.getrandbits(128):032x}"
