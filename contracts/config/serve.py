"""Section `serve`."""

import re

from contracts.config.section import Section


class ServeConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The application on its Ray cluster."""

    name: str = "tandem"
    """Application name, unique on the Ray cluster: 1 to 40 letters, digits and "-", "_", ".",
    starting and ending with a letter or digit. Behind Serve it is that of the application."""

    def __post_init__(self) -> None:
        if re.fullmatch(r"[a-z0-9]([a-z0-9._-]{0,38}[a-z0-9])?", self.name, re.I | re.A) is None:
            raise ValueError(
                f"name={self.name!r}: use 1 to 40 letters, digits and - _ ., a letter or digit "
                "first and last"
            )
