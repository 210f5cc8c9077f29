"""Which experts the next layer will want, foretold while this layer's experts are computed.

    r_l: residual after attention   x_l = norm_l(r_l)   d_l: what chosen experts give on average
    q_l = norm_{l+1}(r_l + d_l)      the quasi-hidden state (Speculating Experts, Eq. 2 and 3)

    "router"   router_{l+1}(x_l)          the paper's baseline
    "quasi"    router_{l+1}(q_l)          the paper's Router-PF
    "fitted"   W_l [q_l, 1]               least squares on the next router's logits (ours)

Where a profile knows how precise each is, each layer has the best of them (Section 6.3's hybrid).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from models.decoder.decoder import AttentionHalf
from models.experts.expert_cache import Guess
from models.experts.router import Routed
from models.foresight.routing_profile import RoutingProfile

Kind = Literal["router", "quasi", "fitted"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
FIRST_PRECISION: Final = 0.5  # until something is known
_NEWEST: Final = 0.02  # of what was right, in a running mean


class Foresight:
    """Owned by the thread that computes. precision_LK: of the guess of rank k for layer L, from the
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
        self.precision_LK = torch.full((spec.num_layers, spec.top_k), FIRST_PRECISION)
        for layer, chosen in self._kind_of.items():
            if profile is not None and chosen in profile.precision:
                self.precision_LK[layer] = profile.precision[chosen][layer]

    def next_layer(self, layer: int) -> int | None:
        """That has experts."""
        return self._next_of.get(layer)

    def route(self, layer: int, hidden_TD: Tensor, routed: Routed) -> Tensor:
        """[T, K] experts of the layer after `layer`, likely ones, the best guess first."""
        following = self._next_of[layer]
        return foretold(
            self._half, self._profile, self._kind_of[following], layer, following, hidden_TD, routed
        ).topk_ids_TK

    def guesses(self, layer: int, ids_TK: Tensor) -> list[Guess]:
        """What to read for that layer: an expert's confidence is that some token wants it."""
        doubts: dict[int, float] = {}
        ranks = self.precision_LK[layer].tolist()
        for ids in ids_TK.tolist():
            for expert, precision in zip(ids, ranks, strict=True):
                doubts[expert] = doubts.get(expert, 1.0) * (1.0 - precision)
        return [Guess(expert, 1.0 - doubt) for expert, doubt in doubts.items()]

    def learn(self, layer: int, foretold_TK: Tensor, ids_TK: Tensor) -> None:
        """What the layer did want."""
        self.precision_LK[layer] += _NEWEST * (
            hits_by_rank(foretold_TK, ids_TK).mean(0) - self.precision_LK[layer]
        )


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
    q_TD = half.mlp_input(following, quasi_hidden(profile, layer, hidden_TD, routed))
    if kind == "quasi":
        return router(q_TD)
    map_ED = profile.maps[layer]
    logits_TE = torch.addmm(map_ED[:, -1], q_TD.float(), map_ED[:, :-1].T)
    return router.choose(q_TD, logits_TE)


def quasi_hidden(profile: RoutingProfile, layer: int, hidden_TD: Tensor, routed: Routed) -> Tensor:
    """r_l + d_l: with what the chosen experts give on average, in their weights (Eq. 2)."""
    means_TKD = profile.means[layer][routed.topk_ids_TK]
    default_TD = torch.einsum("tk,tkd->td", routed.topk_weights_TK, means_TKD)
    return (hidden_TD.float() + default_TD).to(hidden_TD.dtype)


def hits_by_rank(foretold_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """[T, K] 1.0 where the guess of that rank is one of the token's experts."""
    return (foretold_TK.unsqueeze(2) == ids_TK.unsqueeze(1)).any(2).float()


def _best(profile: RoutingProfile | None, layer: int) -> Kind:
    if profile is None:
        return "router"
    known: Iterable[Kind] = [kind for kind in KINDS if kind in profile.precision]
    return max(known, key=lambda kind: float(profile.precision[kind][layer].mean()))
