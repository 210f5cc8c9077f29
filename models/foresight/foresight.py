"""Which experts the next layer will want, foretold while this layer's experts are computed.

    r_l: residual after attention   x_l = norm_l(r_l)   d_l: what chosen experts give on average
    q_l = norm_{l+1}(r_l + d_l)      the quasi-hidden state (Speculating Experts, Eq. 2 and 3)

    "router"   router_{l+1}(x_l)          the paper's baseline
    "quasi"    router_{l+1}(q_l)          the paper's Router-PF
    "fitted"   W_l [x_l, s_l, 1]          least squares on the next router's logits (ours); s_l: the
                                          weight of each expert of this layer, 0 if not chosen

Where a profile knows how precise each is, each layer has the best of them (Section 6.3's hybrid).
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from models.decoder.decoder import AttentionHalf
from models.experts.expert_cache import Guess
from models.experts.router import Routed
from models.foresight.routing_profile import RoutingProfile

Ids = list[list[int]]
"""[T][K] experts of each token."""

Kind = Literal["router", "quasi", "fitted"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
MOST_ROWS: Final = 64  # of a batch are looked at: those of more want most experts anyway
FIRST_PRECISION: Final = 0.5  # until something is known
_NEWEST: Final = 0.02  # of what was right, in a running mean


class Foresight:
    """Owned by the thread that computes. precision: of the guess of each rank, by layer; from the
    profile at first, then as it turns out."""

    def __init__(
        self, half: AttentionHalf, profile: RoutingProfile | None, kind: Kind | None = None
    ) -> None:
        """kind: None: at each layer the most precise one."""
        self._half, self._profile = half, profile
        spec = half.spec
        self._next_of = dict(zip(spec.moe_layers, spec.moe_layers[1:], strict=False))
        self._kind_of = {
            following: kind or _best(profile, following) for following in self._next_of.values()
        }
        self.precision: dict[int, list[float]] = {}
        for layer, chosen in self._kind_of.items():
            known = None if profile is None else profile.precision.get(chosen)
            even = [FIRST_PRECISION] * spec.top_k
            self.precision[layer] = even if known is None else known[layer].tolist()

    def next_layer(self, layer: int) -> int | None:
        """That has experts."""
        return self._next_of.get(layer)

    def route(self, layer: int, hidden_TD: Tensor, routed: Routed) -> Ids:
        """For each token (of many for some), experts of the layer after `layer`, the most likely
        one first."""
        following = self._next_of[layer]
        kind = self._kind_of[following]
        if len(hidden_TD) > MOST_ROWS:
            hidden_TD, routed = (
                _some(hidden_TD),
                Routed(
                    _some(routed.x_TD), _some(routed.topk_ids_TK), _some(routed.topk_weights_TK)
                ),
            )
        found = foretold(self._half, self._profile, kind, layer, following, hidden_TD, routed)
        ids: Ids = found.topk_ids_TK.tolist()
        return ids

    def guesses(self, layer: int, foretold: Ids) -> list[Guess]:
        """What to read for that layer, the best guess first. An expert's confidence is that some
        token wants it."""
        doubts: dict[int, float] = {}
        for ids in foretold:
            for expert, precision in zip(ids, self.precision[layer], strict=True):
                doubts[expert] = doubts.get(expert, 1.0) * (1.0 - precision)
        return [Guess(e, 1.0 - doubt) for e, doubt in sorted(doubts.items(), key=itemgetter(1))]

    def learn(self, layer: int, foretold: Ids, ids_TK: Tensor) -> None:
        """What the layer did want. Where it was computed for some of the rows only, nothing is
        learned."""
        came: Ids = _some(ids_TK).tolist()
        if len(came) != len(foretold):
            return
        means = self.precision[layer]
        for rank in range(len(means)):
            right = sum(
                guess[rank] in ids for guess, ids in zip(foretold, came, strict=True)
            ) / len(came)
            means[rank] += _NEWEST * (right - means[rank])


def _some(rows_T: Tensor) -> Tensor:
    """At most MOST_ROWS of them, evenly."""
    return rows_T[:: -(-len(rows_T) // MOST_ROWS)] if len(rows_T) > MOST_ROWS else rows_T


def foretold(
    half: AttentionHalf,
    profile: RoutingProfile | None,
    kind: Kind,
    layer: int,
    following: int,
    hidden_TD: Tensor,
    routed: Routed,
) -> Routed:
    """The routing at layer `following`, from what is known before the experts of `layer`."""
    router = half.router(following)
    assert router is not None
    if kind == "router" or profile is None:
        return router(routed.x_TD)
    if kind == "quasi":
        return router(half.mlp_input(following, quasi_hidden(profile, layer, hidden_TD, routed)))
    return router.choose(routed.x_TD, features(routed, router.experts) @ profile.maps[layer])


def features(routed: Routed, experts: int) -> Tensor:
    """[T, D + E + 1] float32: x, the weight of each expert, 1."""
    x_TD, weights_TK = routed.x_TD, routed.topk_weights_TK
    T, D = x_TD.shape
    found = torch.zeros(T, D + experts + 1)
    found[:, :D] = x_TD
    found.scatter_(1, routed.topk_ids_TK + D, weights_TK)
    found[:, -1] = 1.0
    return found


def quasi_hidden(profile: RoutingProfile, layer: int, hidden_TD: Tensor, routed: Routed) -> Tensor:
    """r_l + d_l: with what the chosen experts give on average, in their weights (Eq. 2)."""
    means_TKD = profile.means[layer][routed.topk_ids_TK]
    default_T1D = torch.bmm(routed.topk_weights_TK.unsqueeze(1), means_TKD)
    return (hidden_TD.float() + default_T1D.squeeze(1)).to(hidden_TD.dtype)


def hits_by_rank(foretold_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """[T, K] 1.0 where the guess of that rank is one of the token's experts."""
    return (foretold_TK.unsqueeze(2) == ids_TK.unsqueeze(1)).any(2).float()


def _best(profile: RoutingProfile | None, layer: int) -> Kind:
    if profile is None:
        return "router"
    known: Iterable[Kind] = [kind for kind in KINDS if kind in profile.precision]
    return max(known, key=lambda kind: float(profile.precision[kind][layer].mean()))
