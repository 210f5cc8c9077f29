"""What a frame that cannot be decoded raises."""

from __future__ import annotations

import msgspec

# msgspec gives up on a deeply nested frame with Python's own RecursionError.
BAD_FRAME = (msgspec.MsgspecError, RecursionError)
