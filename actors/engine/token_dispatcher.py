"""A2E and E2A of an attention rank's micro-batches: routed rows go out in packets, what the experts
answer is added to the residual.

Packets are written straight into the channel's memory: no copy of a row is made on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from actors.channels.base import Endpoint, Header, Kind, Part
from actors.engine.micro_batch import MicroBatch
from actors.experts.dispatch import RankSlice, plan_dispatch
from contracts.clock import Clock
from contracts.requests import Priority
from models.experts.router import Routed
from planner.findep.placement import ExpertPlacement
from planner.findep.split import token_group_bounds


class TokenDispatcher:
    """Owned by the executor's thread. `dispatch` leaves in a micro-batch what `combine` needs."""

    def __init__(
        self,
        endpoint: Endpoint,
        placement: ExpertPlacement,
        expert_ranks: Sequence[str],
        clock: Clock,
    ) -> None:
        """expert_ranks: names, by rank number."""
        self._endpoint = endpoint
        self._placement = placement
        self._expert_ranks = expert_ranks
        self._clock = clock

    def dispatch(self, micro_batch: MicroBatch, routed: Routed) -> None:
        """A2E: one packet per token group and expert rank that has work in it."""
        micro_batch.slices = plan_dispatch(
            routed.topk_ids_TK.cpu().numpy(),
            routed.topk_weights_TK.cpu().numpy(),
            token_group_bounds(routed.x_TD.shape[0], micro_batch.batch.plan.r2),
            self._placement,
        )
        micro_batch.pending = len(micro_batch.slices)
        for piece in micro_batch.slices:
            self._send(micro_batch, piece, routed.x_TD)

    def _send(self, micro_batch: MicroBatch, piece: RankSlice, x_TD: torch.Tensor) -> None:
        sent_s = micro_batch.sent_s = self._clock()
        pairs = len(piece.index_N)
        reservation = self._endpoint.reserve(
            self._expert_ranks[piece.rank],
            (
                Part(str(x_TD.dtype)[6:], (piece.num_rows, x_TD.shape[1])),
                Part("int32", (pairs,)),
                Part("float32", (pairs,)),
                Part("int32", (len(piece.counts_e),)),
            ),
        )
        x_UD, index_N, weights_N, counts_e = reservation.tensors
        if piece.rows_U is None:
            x_UD.copy_(x_TD[piece.start : piece.stop])
        else:
            torch.index_select(x_TD, 0, _to(piece.rows_U, x_TD.device), out=x_UD)
        index_N.copy_(torch.from_numpy(piece.index_N))
        weights_N.copy_(torch.from_numpy(piece.weights_N))
        counts_e.copy_(torch.from_numpy(piece.counts_e))
        scheduled = micro_batch.batch.scheduled
        # SHARED runs before the packet leaves under NAIVE and PPPIPE: the layer has then advanced.
        header = Header(
            Kind.A2E,
            self._endpoint.epoch,
            scheduled.number,
            micro_batch.attended,
            micro_batch.index,
            piece.token_group,
            Priority(scheduled.priority),
            sent_s,
        )
        self._endpoint.commit(reservation, header)

    def combine(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Adds the experts' (and the shared expert's) output to the residual, in place.

        Sums go rank by rank in fp32, whatever the order of arrival: equal inputs, equal bits.
        """
        hidden_TD = micro_batch.hidden_TD
        assert hidden_TD is not None
        slices, micro_batch.slices = micro_batch.slices, []
        shared_TD, micro_batch.shared_TD = micro_batch.shared_TD, None
        if not slices:
            return hidden_TD
        total_TD = hidden_TD
        if self._placement.ranks > 1 or shared_TD is not None:
            total_TD = torch.zeros(hidden_TD.shape, dtype=torch.float32, device=hidden_TD.device)
        for piece in slices:
            packet = micro_batch.replies.pop((piece.token_group, piece.rank))
            (y_UD,) = packet.tensors
            if piece.rows_U is None:
                total_TD[piece.start : piece.stop] += y_UD
            else:
                rows_U = _to(piece.rows_U, hidden_TD.device)
                total_TD.index_add_(0, rows_U, y_UD.to(total_TD.dtype))
            packet.release()
        if shared_TD is not None:
            total_TD += shared_TD
        if total_TD is not hidden_TD:
            hidden_TD += total_TD.to(hidden_TD.dtype)
        return hidden_TD


def _to(rows_U: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rows_U).to(device)
