"""What the API asks of whatever runs its requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from contracts.messages import Finished, Scored, Submit, Tokens


class Backend(Protocol):
    """What runs requests: `pipelines.Pipelines`, an `admission.Admission`, or a test's own."""

    def generate(
        self, submit: Submit, *, wait_for_slot: bool = False
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        """Batches of events, a `Finished` last. Closing it cancels. Raises TandemError.

        patient: wait for room where otherwise OverloadError would be raised.
        """

    async def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Scored:
        """The answer of a prefill-only job. Raises TandemError."""

    def pool_tokens(self, *, prefill: bool) -> int | None:
        """What the smallest KV pool holds that such a request may come to; None: not known.
        prefill: it generates one token at most."""

    def problems(self) -> list[str]:
        """Why it is not ready, one line each; empty: ready."""

    def waiting(self) -> Mapping[tuple[str, str], int]:
        """Sequences that wait for a first answer, by (pipeline, class)."""
