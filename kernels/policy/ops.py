"""Differentiable pieces of the policy with hand-written gradients: faster than autograd's, and free of scatter-adds.

A gradient of a gather is a scatter-add, whose order of summation is not fixed on every device. All index maps here are
one-to-one (or K-to-one with K summed in order), so both directions are gathers and the bits depend on nothing else.
Formulas: RMSNorm, Zhang & Sennrich 2019; SwiGLU, Shazeer 2020; the experts as in Hugging Face's Qwen3MoeExperts.

Legend: T tokens, H hidden, K experts a token, N = T*K assignments sorted by expert, E experts, I expert width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class _Gather(torch.autograd.Function):
    """rows_R = x_T[token_R]; the gradient of padding rows is dropped, that of the others goes home by row_T."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, token_R: Tensor, row_T: Tensor) -> Tensor:
        ctx.save_for_backward(row_T)
        return x_T.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (row_T,) = ctx.saved_tensors
        return grads[0].index_select(0, row_T), None, None


class _GatherBack(torch.autograd.Function):
    """x_T = rows_R[row_T]; padding rows get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, rows_R: Tensor, row_T: Tensor, token_R: Tensor, padding: Tensor) -> Tensor:
        ctx.save_for_backward(token_R, padding)
        return rows_R.index_select(0, row_T)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        token_R, padding = ctx.saved_tensors
        return grads[0].index_select(0, token_R).index_fill_(0, padding, 0.0), None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = torch.rsqrt_(x.square().mean(-1, keepdim=True).add_(eps))
        normed = x * rstd
        ctx.save_for_backward(normed, rstd, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        normed, rstd, weight = ctx.saved_tensors
        grad = grads[0]
        product = grad * normed
        grad_weight = product.reshape(-1, weight.shape[-1]).sum(0) if weight.dim() == 1 else product.sum(0)
        # d/dx of w*x*rstd: rstd * (g*w - normed * mean(g*w*normed))
        mean = product.mul_(weight).mean(-1, keepdim=True)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1.0).mul_(rstd)
        return grad_x, grad_weight, None


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, gates_TK: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor
    ) -> Tensor:
        tokens, k = ids_TK.shape
        order_N = ids_TK.reshape(-1).argsort(stable=True)
        place_N = torch.empty_like(order_N)
        place_N[order_N] = torch.arange(tokens * k, device=order_N.device)
        counts = torch.bincount(ids_TK.reshape(-1), minlength=gate_up.shape[0]).tolist()
        token_N = order_N if k == 1 else order_N.div(k, rounding_mode="floor")
        x_NH = x_TH.index_select(0, token_N)
        hidden_N2I = x_NH.new_empty(tokens * k, gate_up.shape[1])
        y_NH = x_NH.new_empty(tokens * k, x_TH.shape[1])
        width = down.shape[2]
        start = 0
        for expert, count in enumerate(counts):
            if count:
                torch.mm(
                    x_NH[start : start + count], gate_up[expert].t(), out=hidden_N2I[start : start + count]
                )
            start += count
        act_NI = torch.nn.functional.silu(hidden_N2I[:, :width]).mul_(hidden_N2I[:, width:])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                torch.mm(act_NI[start : start + count], down[expert].t(), out=y_NH[start : start + count])
            start += count
        y_TKH = y_NH.index_select(0, place_N).view(tokens, k, -1)
        ctx.counts = counts
        ctx.save_for_backward(
            x_NH, hidden_N2I, act_NI, y_TKH, gates_TK, gate_up, down, token_N, place_N, order_N
        )
        return torch.bmm(gates_TK.unsqueeze(1), y_TKH).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x_NH, hidden_N2I, act_NI, y_TKH, gates_TK, gate_up, down, token_N, place_N, order_N = (
            ctx.saved_tensors
        )
        grad_TH = grads[0].contiguous()
        tokens, k = gates_TK.shape
        width = down.shape[2]
        grad_gates_TK = torch.bmm(y_TKH, grad_TH.unsqueeze(2)).squeeze(2)
        gates_N = gates_TK.reshape(-1).index_select(0, order_N)
        grad_y_NH = grad_TH.index_select(0, token_N).mul_(gates_N.unsqueeze(1))
        grad_act_NI = torch.empty_like(act_NI)
        grad_hidden_N2I = torch.empty_like(hidden_N2I)
        grad_x_NH = torch.empty_like(x_NH)
        grad_gate_up = torch.zeros_like(gate_up)
        grad_down = torch.zeros_like(down)
        start = 0
        for expert, count in enumerate(ctx.counts):
            if count:
                rows = slice(start, start + count)
                torch.mm(grad_y_NH[rows], down[expert], out=grad_act_NI[rows])
                torch.mm(grad_y_NH[rows].t(), act_NI[rows], out=grad_down[expert])
            start += count
        gate_NI, up_NI = hidden_N2I[:, :width], hidden_N2I[:, width:]
        grad_hidden_N2I[:, :width] = torch.ops.aten.silu_backward(grad_act_NI * up_NI, gate_NI)
        torch.mul(grad_act_NI, torch.nn.functional.silu(gate_NI), out=grad_hidden_N2I[:, width:])
        start = 0
        for expert, count in enumerate(ctx.counts):
            if count:
                rows = slice(start, start + count)
                torch.mm(grad_hidden_N2I[rows], gate_up[expert], out=grad_x_NH[rows])
                torch.mm(grad_hidden_N2I[rows].t(), x_NH[rows], out=grad_gate_up[expert])
            start += count
        grad_x_TH = grad_x_NH.index_select(0, place_N).view(tokens, k, -1).sum(1)
        return grad_x_TH, grad_gates_TK, grad_gate_up, grad_down, None


def gather(x_T: Tensor, token_R: Tensor, row_T: Tensor) -> Tensor:
    """[T, ...] -> [R, ...]: row r is token token_R[r]. row_T is its right inverse: token_R[row_T[t]] == t."""
    return cast(Tensor, _Gather.apply(x_T, token_R, row_T))


def gather_back(rows_R: Tensor, row_T: Tensor, token_R: Tensor, padding: Tensor) -> Tensor:
    """[R, ...] -> [T, ...]: the way back of `gather`; `padding` are the rows that no token reads."""
    return cast(Tensor, _GatherBack.apply(rows_R, row_T, token_R, padding))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight [D], or [heads, D] for x [T, heads, D]."""
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))


def experts(x_TH: Tensor, gates_TK: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor) -> Tensor:
    """Sum over k of gates[t, k] * SwiGLU of expert ids[t, k]. gate_up [E, 2I, H], down [E, H, I]; ids i64 [T, K]."""
    return cast(Tensor, _Experts.apply(x_TH, gates_TK, gate_up, down, ids_TK))


__all__ = ["experts", "gather", "gather_back", "rms_norm"]
