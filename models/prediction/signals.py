"""Signals that the experts of the next layer are predicted from.

    r_l: residual after attention    x_l = norm_l(r_l)
    d_l: weighted mean outputs of the chosen and shared experts
    q_l = norm_{l+1}(r_l + d_l)      the quasi-hidden state (Speculating Experts, Eq. 2 and 3)

Before the experts of layer l:

    "router"     router_{l+1}(x_l)          the paper's baseline
    "fitted"     W_l [x_l, s_l, 1]          least squares on the next router's logits (ours); s_l:
                                            the weight of each expert of layer l, 0 if not chosen
    "quasi"      router_{l+1}(q_l)          the paper's Router-PF
    "estimator"  a network of q_l and l     the paper's Est-PF (`Estimator`)

Before the first attention:

    "token"      a table by token id (ours)
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch
from torch import Tensor

from models.decoder.decoder import AttentionHalf
from models.experts.router import RoutedTokens
from models.prediction.routing_profile import RoutingProfile

PredictorKind = Literal["router", "fitted", "quasi", "estimator"]
PREDICTOR_KINDS: Final[tuple[PredictorKind, ...]] = get_args(PredictorKind)
"""The cheapest first."""
TOKEN: Final = "token"


def predict_routing(
    half: AttentionHalf,
    profile: RoutingProfile | None,
    kind: PredictorKind,
    layer: int,
    following: int,
    hidden_TD: Tensor,
    routed: RoutedTokens,
) -> RoutedTokens:
    """Predict layer `following` before the experts of `layer` are computed."""
    router = half.router(following)
    assert router is not None
    if kind == "router" or profile is None:
        return router(routed.x_TD)
    if kind == "fitted":
        return router.choose(routed.x_TD, features(routed, router.experts) @ profile.maps[layer])
    q_TD = half.mlp_input(following, quasi_hidden(profile.means[layer], hidden_TD, routed))
    if kind == "quasi":
        return router(q_TD)
    return router.choose(q_TD, profile.estimator.logits(layer, q_TD))


def features(routed: RoutedTokens, experts: int) -> Tensor:
    """Return [T, D + E + 1] float32: x, the weight of each expert, 1."""
    x_TD, weights_TK = routed.x_TD, routed.topk_weights_TK
    T, D = x_TD.shape
    found = torch.zeros(T, D + experts + 1, device=x_TD.device)
    found[:, :D] = x_TD
    found.scatter_(1, routed.topk_ids_TK + D, weights_TK)
    found[:, -1] = 1.0
    return found


def quasi_hidden(means_ED: Tensor, hidden_TD: Tensor, routed: RoutedTokens) -> Tensor:
    """Return r_l + d_l, the residual with mean outputs of the chosen experts (Eq. 2)."""
    means_TKD = means_ED[routed.topk_ids_TK]
    default_T1D = torch.bmm(routed.topk_weights_TK.unsqueeze(1), means_TKD)
    return (hidden_TD.float() + default_T1D.squeeze(1)).to(hidden_TD.dtype)


def hits_by_rank(predicted_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Return [T, K]: 1.0 if the prediction of that rank is one of the token's experts."""
    return (predicted_TK.unsqueeze(2) == ids_TK.unsqueeze(1)).any(2).float()
