"""Base class and field types of the configuration's sections."""

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
# The command line makes relative paths absolute, because ranks run in other folders. InputPath: an
# existing file or folder, or a name ("bundled"). OutputFolder: created if it does not exist.
InputPath = Annotated[str, Meta(extra={"path": "input"})]
OutputFolder = Annotated[str, Meta(extra={"path": "output"})]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of a section."""
