"""The share of a rank's time that best-effort work gets, whatever else comes: by a credit.

    credit   0 ────╮ BE is ready, others run: + f per second      (f = priority.be_share)
                   ╰────────╮ BE runs: - (1 - f) per second
             BE is served first while credit > 0

While BE is ready it gets at least f of the time, but for a delay that docs/notation.md bounds.
QLLM (Section 6) leaves starvation open.
"""

from __future__ import annotations


class ShareFloor:
    """Credit in seconds. It lies between -(1 - f) of the longest BE slice and f of what else the
    rank does at a time."""

    def __init__(self, share: float) -> None:
        """share: f, 0 <= f < 1; 0: BE has no claim."""
        self._share = share
        self.credit_s = 0.0

    @property
    def is_owed(self) -> bool:
        """Whether BE goes first."""
        return self.credit_s > 0.0

    def kept_waiting(self, seconds: float) -> None:
        """BE was ready for so long, and did not run."""
        self.credit_s += self._share * seconds

    def served(self, seconds: float) -> None:
        """A BE slice ran. What it had for nothing, while nobody else wanted the rank, is not held
        against it beyond that slice."""
        charge = (1.0 - self._share) * seconds
        self.credit_s = max(self.credit_s - charge, -charge)
