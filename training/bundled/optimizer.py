"""Muon for the hidden matrices, AdamW for the rest.

Muon (K. Jordan, 2024): momentum, then the nearest orthogonal matrix by five Newton-Schulz steps.
Expert matrices [E, out, in] are orthogonalised one by one, in one batched product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonal(x: Tensor) -> Tensor:
    """Return `x` [..., rows, columns] with singular values pushed towards 1, in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    wide = x.shape[-2] <= x.shape[-1]
    y = (x if wide else x.mT).to(torch.bfloat16)
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return torch.as_tensor(y if wide else y.mT)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates and decoupled weight decay."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter from its gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param)
                momentum = state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                nesterov = param.grad.lerp(momentum, group["momentum"])
                parts = (
                    nesterov.unflatten(-2, (2, -1))
                    if param.ndim == 3 and _is_fused(param)
                    else nesterov
                )
                update = orthogonal(parts).reshape(param.shape).to(param.dtype)
                scale = max(1.0, parts.shape[-2] / parts.shape[-1]) ** 0.5
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-group["lr"] * scale)


def _is_fused(param: Tensor) -> bool:
    """Return whether an expert matrix stacks gate and up, as marked by `make_optimizers`."""
    return bool(getattr(param, "fused_gate_up", False))


def make_optimizers(
    named: Sequence[tuple[str, nn.Parameter]],
    *,
    muon_lr: float,
    adam_lr: float,
    weight_decay: float,
) -> list[torch.optim.Optimizer]:
    """Return Muon for attention and experts, AdamW for the rest; neither without parameters."""
    for name, param in named:
        param.fused_gate_up = "gate_up_proj" in name  # type: ignore[attr-defined]
    hidden = [param for name, param in named if "_proj" in name]
    matrices = [param for name, param in named if "_proj" not in name and param.ndim > 1]
    vectors = [param for _, param in named if param.ndim == 1]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        optimizers.append(Muon(hidden, muon_lr, 0.95, weight_decay))
    if matrices or vectors:
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        adam = torch.optim.AdamW(groups, lr=adam_lr, betas=(0.9, 0.98), fused=True)
        optimizers.append(adam)
    return optimizers
