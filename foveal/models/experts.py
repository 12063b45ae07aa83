"""Mixture-of-experts layers as grouped matrix products: one product over all experts, rows sorted by expert.

transformers has such an implementation too (`experts_implementation="grouped_mm"`). This one differs in two things.
Under autocast it computes in the 16-bit type, where float32 weights would otherwise be multiplied as they are; and its
backward pass gathers rows by the inverse order, where indexing would add them up one by one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

NAME = "foveal"


def install_experts(model: Any) -> None:
    """Registers the function and switches the experts of a model, if it has any, over to it.

    The routers' logits aren't collected either: nothing here reads them. An auxiliary loss that balances the experts
    (`router_aux_loss_coef` of a model's configuration) is not part of any policy loss.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    text = model.config.get_text_config()
    if getattr(text, "num_experts", None) is None:
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
    model.set_experts_implementation(NAME)
    text.output_router_logits = False


def grouped_experts(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of what the chosen experts make of each token.

    Args:
        experts: a module with `gate_up_proj` (E, 2·I, H) and `down_proj` (E, H, I).
        hidden: (T, H).
        chosen: (T, K) int64, the experts of each token.
        weights: (T, K), how much each counts.

    Returns:
        (T, H) in the type of `hidden`.
    """
    tokens, count = chosen.shape
    by_expert, order = chosen.flatten().sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(experts.gate_up_proj.shape[0], device=order.device)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else experts.gate_up_proj.dtype
    rows = _Spread.apply(hidden.to(dtype), order, inverse, count)
    rows = experts._apply_gate(_grouped_linear(rows, experts.gate_up_proj.to(dtype), ends))
    rows = _grouped_linear(rows.to(dtype), experts.down_proj.to(dtype), ends)
    outputs = _Reorder.apply(rows, inverse, order).view(tokens, count, -1)
    return (outputs * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(S, out): each row times its expert's weight; the kernel where it takes them, else expert by expert.

    Args:
        rows: (S, in), sorted by expert. weight: (E, out, in).
        ends: (E,) int32, where each expert's rows end.
    """
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0  # rows of 16 bytes
    if rows.dtype == torch.bfloat16 and aligned:
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(part, one) for part, one in zip(rows.split(lengths), weight.unbind(), strict=True)])


class _Spread(torch.autograd.Function):
    """A copy of each token for each of its experts, in the experts' order; gradients of the copies are summed."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.count = count
        return hidden[order // count]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return gradient[inverse].view(-1, ctx.count, gradient.shape[1]).sum(1), None, None, None


class _Reorder(torch.autograd.Function):
    """Rows in another order, and gradients back in the old one."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None
