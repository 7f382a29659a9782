"""Losses without logits that have class weights or a z-loss: made of the losses of rows, for tensors, arrays and values of a trace.

The logarithm of the sum of `e^logit` of a row is its loss and the logit of its target, which is one dot product. So neither term needs
the logits.
"""

from __future__ import annotations

import sys
from typing import Any, Optional

from . import _call
from ._operands import Tensor, shape_of


def check_options(classes: int, class_weights: Optional[Tensor], z_loss: float) -> None:
    """Refuses weights of another shape, and a factor that is none."""
    if class_weights is not None:
        sizes = shape_of("linear_cross_entropy", "class_weights", class_weights)
        if tuple(sizes) != (classes,):
            raise ValueError(f"linear_cross_entropy: expected class_weights [{classes}], got {list(sizes)}")
        if getattr(class_weights, "requires_grad", False):
            raise ValueError("linear_cross_entropy: expected class_weights that require no gradient; detach them")
    if isinstance(z_loss, bool) or not isinstance(z_loss, (int, float)) or not 0 <= z_loss < float("inf"):
        raise ValueError(f"linear_cross_entropy: expected z_loss finite and not negative, got {z_loss!r}")


def assembled(
    losses: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    reduction: str,
    ignore_index: Optional[int],
    label_smoothing: float,
    class_weights: Optional[Tensor],
    z_loss: float,
) -> Tensor:
    """The loss from those of rows, which have neither smoothing nor weights."""
    wide, head = _wide(x), _wide(weight)
    counted = None if ignore_index is None else targets != ignore_index
    safe = targets if counted is None else _chosen(counted, targets, 0)
    logsumexp = losses + (wide * head[safe]).sum(-1)
    rows, shares = losses, None
    if class_weights is not None:
        weights = _wide(class_weights)
        shares = _rows(weights, safe)
        rows = losses * shares
    if label_smoothing:
        # Every class has a small part in the target: the mean of `w (logsumexp - logit)` over classes.
        spread = head if class_weights is None else head * weights.reshape(-1, 1)
        every = float(weight.shape[0]) if class_weights is None else weights.sum()
        smooth = logsumexp * every - (wide * spread.sum(0)).sum(-1)
        rows = rows * (1.0 - label_smoothing) + smooth * (label_smoothing / weight.shape[0])
    rows, penalty = _kept(counted, rows), _kept(counted, logsumexp * logsumexp * z_loss)
    if reduction == "none":
        return rows + penalty
    if reduction == "sum":
        return rows.sum() + penalty.sum()
    ones = _kept(counted, losses * 0.0 + 1.0)
    count = ones.sum()
    return rows.sum() / (count if shares is None else (shares * ones).sum()) + penalty.sum() / count


def _is_value(x: Any) -> bool:
    """Whether it is one of a function that is traced."""
    return _call.traced is not None and isinstance(x, _call.traced[0])


def _wide(x: Any) -> Any:
    """In 32 bits, or in the 64 that it has."""
    if _is_value(x):
        return x.float()
    return x if str(x.dtype).endswith(("float32", "float64")) else x.float() if hasattr(x, "float") else x.astype("float32")


def _rows(weights: Any, indices: Any) -> Any:
    """Elements picked by indices; a trace picks rows."""
    return weights.reshape(-1, 1)[indices].reshape(*indices.shape)


def _kept(counted: Any, x: Any) -> Any:
    return x if counted is None else _chosen(counted, x, 0.0)


def _chosen(condition: Any, x: Any, other: Any) -> Any:
    if _is_value(condition):
        from .trace import where

        return where(condition, x, other)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(condition, torch.Tensor):
        return torch.where(condition, x, torch.as_tensor(other, dtype=x.dtype, device=x.device))
    import numpy

    return numpy.where(condition, x, numpy.asarray(other, x.dtype))
