"""Predictors of a checkpoint's routing in a file that may also contain counts (routing_counts.py).

    mean.L          [E, D] float32   mean unweighted output of each expert ("default vectors"),
                                     with its part of the shared experts' mean
    frequency.L     [E] float32      fraction of the tokens that go to it
    map.L           [D + E + 1, E]   least squares from x, the weights of layer L's experts, and 1
                                     to the logits of the next layer's router
    estimator.NAME                   of a network (`Estimator`)
    tokens          [V, K] int32     likeliest experts of the first MoE layer, by token id
    precision.KIND  [L, K]           of rank k at layer L, on held-out texts

Source: Speculating Experts, Sections 3.1 to 3.3 and 6.1; the maps and the table are ours
(docs/deviations.md).

The estimator of the next layer's routing, distilled from the routers, is one small network for all
layers (Speculating Experts, Section 6.1 and Appendix A):

    q [D] ──> down ──> + embedding of the layer = h [R] ──> h + outer(silu(inner(h))) ──> LayerNorm
                                                              ──> head ──> logits of E experts

q: the quasi-hidden state. R, H: widths, which the paper does not state.

Signals that the experts of the next layer are predicted from:

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

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from contracts.errors import CheckpointError
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import RoutedTokens
from models.prediction.profile_file import (
    CHECKPOINT,
    MAKE_ONE,
    checked_tensor,
    checkpoint_digest,
    has_predictor,
    open_profile,
    write_arrays,
)
from models.prediction.routing_counts import RoutingCounts
from models.spec.checkpoint_files import SafetensorsFile
from models.spec.model import ModelSpec

WIDTH: Final = 128  # R, at most the hidden size
ROWS_SEEN: Final = 1_600_000  # in training, over all layers
_BATCH: Final = 1024
_RATE, _WARM_STEPS, _DECAY = 3e-3, 50, 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class Estimator:
    """Weights of the network, all float32."""

    down: Tensor  # [D, R]
    layers: Tensor  # [L, R]; rows of layers without a following MoE layer are unused
    inner: Tensor  # [R, H]
    inner_bias: Tensor  # [H]
    outer: Tensor  # [H, R]
    outer_bias: Tensor  # [R]
    norm: Tensor  # [R]
    norm_bias: Tensor  # [R]
    head: Tensor  # [R, E]
    head_bias: Tensor  # [E]

    def logits(self, layer: int | Tensor, q_TD: Tensor) -> Tensor:
        """Return [T, E]. layer: whose experts are still to be added; one, or each row's."""
        h_TR = q_TD.float() @ self.down + self.layers[layer]
        inner_TH = functional.silu(torch.addmm(self.inner_bias, h_TR, self.inner))
        h_TR = h_TR + torch.addmm(self.outer_bias, inner_TH, self.outer)
        normed_TR = functional.layer_norm(h_TR, self.norm.shape, self.norm, self.norm_bias)
        return torch.addmm(self.head_bias, normed_TR, self.head)

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def shapes(hidden: int, layers: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by name."""
    R = min(WIDTH, hidden)
    H = 2 * R
    return {
        "down": (hidden, R),
        "layers": (layers, R),
        "inner": (R, H),
        "inner_bias": (H,),
        "outer": (H, R),
        "outer_bias": (R,),
        "norm": (R,),
        "norm_bias": (R,),
        "head": (R, experts),
        "head_bias": (experts,),
    }


class EstimatorSamples(NamedTuple):
    """Samples of one layer: quasi-hidden states [N, D], and true logits of the next router."""

    q_ND: Tensor
    logits_NE: Tensor


def train_estimator(
    samples: Mapping[int, EstimatorSamples],
    layers: int,
    *,
    sigmoid: bool,
    progress: Callable[[float], None] = lambda part: None,
) -> Estimator:
    """Train on samples by layer. sigmoid: kind of the routers' scores. progress: fraction."""
    q_ND = torch.cat([each.q_ND for each in samples.values()])
    logits_NE = torch.cat([each.logits_NE for each in samples.values()])
    layer_N = torch.cat([torch.full((len(each.q_ND),), layer) for layer, each in samples.items()])
    rows = len(q_ND)
    estimator = new_estimator(q_ND.shape[1], layers, logits_NE.shape[1])
    with torch.inference_mode(mode=False), torch.enable_grad():
        parameters = [each.requires_grad_() for each in estimator.tensors().values()]
        optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=_DECAY)
        steps = max(1, min(ROWS_SEEN, 40 * rows) // _BATCH)
        generator = torch.Generator().manual_seed(0)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = _rate(step, steps)
            chosen = torch.randint(rows, (_BATCH,), generator=generator)
            found_BE = estimator.logits(layer_N[chosen].clone(), q_ND[chosen].clone())
            loss = _divergence(found_BE, logits_NE[chosen].clone(), sigmoid=sigmoid)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            progress((step + 1) / steps)
        return Estimator(**{n: each.detach() for n, each in estimator.tensors().items()})


def _divergence(found_BE: Tensor, logits_BE: Tensor, *, sigmoid: bool) -> Tensor:
    """Return KL(router || estimator); for sigmoid scores, of one choice for each expert."""
    if sigmoid:
        return functional.binary_cross_entropy_with_logits(found_BE, logits_BE.sigmoid())
    return functional.kl_div(
        found_BE.log_softmax(-1), logits_BE.log_softmax(-1), reduction="batchmean", log_target=True
    )


def _rate(step: int, steps: int) -> float:
    """Return the learning rate: linear rise, then a cosine to zero."""
    warm = min(1.0, (step + 1) / _WARM_STEPS)
    return _RATE * warm * 0.5 * (1.0 + math.cos(math.pi * step / steps))


def new_estimator(hidden: int, layers: int, experts: int) -> Estimator:
    """Return the untrained network, which also serves models without samples."""
    shape_of = shapes(hidden, layers, experts)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(mode=False):
        tensors = {name: torch.zeros(shape) for name, shape in shape_of.items()}
        for name in ("down", "inner", "outer", "head"):
            bound = shape_of[name][0] ** -0.5
            tensors[name].uniform_(-bound, bound, generator=generator)
        tensors["norm"].fill_(1.0)
    return Estimator(**tensors)


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingProfile:
    """Predictors by layer (`maps`: not of the last one); precision: by predictor kind."""

    means: Mapping[int, Tensor]
    frequencies: Mapping[int, Tensor]
    maps: Mapping[int, Tensor]
    estimator: Estimator
    tokens_VK: Tensor
    precision: Mapping[str, Tensor]

    def to(self, device: torch.device) -> RoutingProfile:
        """Return the profile with the tensors for predictions on `device`."""
        if device.type == "cpu":
            return self

        def to_device(by_layer: Mapping[int, Tensor]) -> dict[int, Tensor]:
            return {layer: tensor.to(device) for layer, tensor in by_layer.items()}

        estimator = {name: each.to(device) for name, each in self.estimator.tensors().items()}
        return dataclasses.replace(
            self,
            means=to_device(self.means),
            maps=to_device(self.maps),
            estimator=Estimator(**estimator),
        )

    def write(self, path: Path, folder: Path, counts: RoutingCounts | None = None) -> None:
        """Write the profile of `folder`, with counts if given. Raises CheckpointError."""
        tensors = {
            **{f"mean.{layer}": tensor for layer, tensor in self.means.items()},
            **{f"frequency.{layer}": tensor for layer, tensor in self.frequencies.items()},
            **{f"map.{layer}": tensor for layer, tensor in self.maps.items()},
            **{f"estimator.{name}": each for name, each in self.estimator.tensors().items()},
            "tokens": self.tokens_VK,
            **{f"precision.{kind}": tensor for kind, tensor in self.precision.items()},
        }
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
        digest = {CHECKPOINT: np.frombuffer(checkpoint_digest(folder), np.uint8)}
        write_arrays(path, arrays | (digest if counts is None else counts.arrays()))

    @staticmethod
    def read(path: Path, folder: Path, spec: ModelSpec) -> RoutingProfile:
        """Read the profile of the checkpoint in `folder`. Raises CheckpointError."""
        file = open_profile(path, folder)
        if not has_predictor(file):
            raise CheckpointError(
                f"{path}: a routing profile with counts but without predictors; {MAKE_ONE}"
            )
        experts, hidden = spec.num_experts, spec.hidden_size

        def by_layer(name: str, layers: Iterable[int], *shape: int) -> dict[int, Tensor]:
            return {layer: _tensor(file, f"{name}.{layer}", shape) for layer in layers}

        estimator = {
            name: _tensor(file, f"estimator.{name}", shape)
            for name, shape in shapes(hidden, spec.num_layers, experts).items()
        }
        kinds = [name for name in file.entries if name.startswith("precision.")]
        shape = (spec.num_layers, spec.top_k)
        return RoutingProfile(
            by_layer("mean", spec.moe_layers, experts, hidden),
            by_layer("frequency", spec.moe_layers, experts),
            by_layer("map", spec.moe_layers[:-1], hidden + experts + 1, experts),
            Estimator(**estimator),
            _ids(file, "tokens", (spec.vocab_size, spec.top_k), experts),
            {name.partition(".")[2]: _tensor(file, name, shape) for name in kinds},
        )


def _tensor(file: SafetensorsFile, name: str, shape: tuple[int, ...], dtype: str = "F32") -> Tensor:
    tensor = checked_tensor(file, name, dtype, shape)
    if not tensor.isfinite().all():
        raise CheckpointError(f"{file.path}: {name}: not all values are finite; {MAKE_ONE}")
    return tensor


def _ids(file: SafetensorsFile, name: str, shape: tuple[int, ...], experts: int) -> Tensor:
    ids = _tensor(file, name, shape, "I32")
    if not ((ids >= 0) & (ids < experts)).all():
        raise CheckpointError(f"{file.path}: {name}: not all values are experts; {MAKE_ONE}")
    return ids


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
        return router(routed.router_input)
    if kind == "fitted":
        features_TF = features(routed, router.experts)
        return router.choose(routed.router_input, features_TF @ profile.maps[layer])
    q_TD = half.mlp_input(following, quasi_hidden(profile.means[layer], hidden_TD, routed))
    if kind == "quasi":
        return router(q_TD)
    return router.choose(q_TD, profile.estimator.logits(layer, q_TD))


def features(routed: RoutedTokens, experts: int) -> Tensor:
    """Return [T, D + E + 1] float32: x, the weight of each expert, 1."""
    x_TD, weights_TK = routed.router_input, routed.topk_weights_TK
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
