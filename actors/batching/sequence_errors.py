"""What an exception that was raised for one sequence ends: that sequence, and nothing else.

Two places apply the rule, because there a sequence can be named: `Finisher`, for all that is made
of its logits, and `ServingLoop.admit`. What is raised anywhere else, such as in a layer, is of a
whole batch, and ends the rank.
"""

from __future__ import annotations

import logging

from contracts.errors import OverloadError, TandemError
from contracts.logs import event
from contracts.messages import Failed, Submit

log = logging.getLogger("tandem.worker")


def failed(request_id: int, error: TandemError) -> Failed:
    """The answer of a request that ends with `error`."""
    again_s = error.retry_after_s if isinstance(error, OverloadError) else None
    return Failed(request_id, error.code, error.message, error.status, again_s)


def failed_by(submit: Submit, error: Exception, kind: type[TandemError]) -> Failed:
    """As `failed`; what nobody foresaw goes to the log with its traceback, and its type alone to
    the client, under the code of `kind`."""
    if isinstance(error, TandemError):
        return failed(submit.request_id, error)
    told = {"request_id": submit.caller.name, "error": type(error).__name__}
    event(log, "sequence_failed", logging.ERROR, error, is_private=True, **told)
    return failed(submit.request_id, kind(f"{type(error).__name__}: see the log of the rank"))
