"""Section `serve`."""

from __future__ import annotations

import re

from contracts.config.section import Section


class ServeConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The application on its Ray cluster."""

    name: str = "tandem"
    """Application name, unique on the Ray cluster: 1 to 40 of a-z, 0-9 and -, not starting or
    ending with -."""

    def __post_init__(self) -> None:
        if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", self.name) is None:
            raise ValueError(
                f"name={self.name!r}: use 1 to 40 of a-z, 0-9 and -, of which - is neither first "
                "nor last"
            )
