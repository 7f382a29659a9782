"""Drop-in replacements for functions of `torch.nn.functional`."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from .. import functions
from .._fuse import fuse
from .._operands import Reduction
from .._types import Mask

__all__ = ["cross_entropy", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    *,
    causal_from_end: bool = False,
) -> Tensor:
    """Replaces `torch.nn.functional.scaled_dot_product_attention`: fused in one kernel, with gradients.

    A mask is of truth values (true: attend) or of floats that are added. `is_causal` lets query `i` see the keys up to `i`, as
    torch's does; with `causal_from_end` too, the last query sees all keys. Heads of keys and values are shared with
    `enable_gqa`. A query that may see no key gives zeros. Dropout draws other numbers than torch's, from its generator.

    >>> import torch, deuteron
    >>> q = torch.randn(1, 4, 3, 16)
    >>> k = v = torch.randn(1, 2, 7, 16)
    >>> attend = deuteron.nn.functional.scaled_dot_product_attention
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    >>> bool(torch.allclose(attend(q, k, v, is_causal=True, enable_gqa=True), expected, atol=1e-6))
    True
    """
    name = "scaled_dot_product_attention"
    if attn_mask is not None and is_causal:
        raise ValueError(f"{name}: expected attn_mask or is_causal, got both")
    if causal_from_end and not is_causal:
        raise ValueError(f"{name}: expected causal_from_end only with is_causal")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(f"{name}: expected tensors [.., sequence, features], got {query.dim()} axes")
    mask: Mask[Tensor] = attn_mask if attn_mask is not None else "full"
    if is_causal:
        mask = "causal_from_end" if causal_from_end else "causal"
    lead = query.shape[:-2]
    if enable_gqa:
        query, key, value = (_with_batches(name, tensor) for tensor in (query, key, value))
    key, value = (_beside(name, tensor, query, enable_gqa) for tensor in (key, value))
    attended: Tensor = functions.attention(query, key, value, mask=mask, p=dropout_p, scale=scale)
    return attended.reshape(*lead, *attended.shape[-2:]) if enable_gqa else attended


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor] = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Replaces `torch.nn.functional.cross_entropy`, for targets that are classes or their probabilities, with gradients, and adds `z_loss` times
    `logsumexp(row)^2` of each row that counts, which keeps logits small. It is computed in float32 and has the dtype of `input`, also under autocast, where
    torch's is float32. A target that is neither a class nor ignored is an `IndexError`, which on a GPU a later call raises. Where logits are made by a
    linear layer, `deuteron.linear_cross_entropy` stores only some of them at a time.

    >>> import torch, deuteron
    >>> logits, target = torch.randn(4, 10), torch.tensor([1, 2, -100, 9])
    >>> loss = deuteron.nn.functional.cross_entropy(logits, target)
    >>> bool(torch.allclose(loss, torch.nn.functional.cross_entropy(logits, target), atol=1e-6))
    True
    """
    if isinstance(z_loss, bool) or not isinstance(z_loss, (int, float)) or not 0 <= z_loss < float("inf"):
        raise ValueError(f"cross_entropy: expected z_loss finite and not negative, got {z_loss!r}")
    if weight is not None and weight.requires_grad:
        raise ValueError("cross_entropy: expected a weight that requires no gradient; detach it")
    loss: Tensor = _cross_entropy(input, target, weight, ignore_index, reduction, float(label_smoothing), float(z_loss))
    return loss


@fuse(name="cross_entropy")
def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
) -> Any:
    from ..trace.losses import cross_entropy

    return cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss
    )


def _with_batches(name: str, tensor: Tensor) -> Tensor:
    """`[batch, heads, sequence, features]` of any number of leading axes, of which the last is of heads."""
    if tensor.dim() < 3:
        raise ValueError(f"{name}: expected [.., heads, sequence, features] with enable_gqa, got {list(tensor.shape)}")
    return tensor if tensor.dim() == 4 else tensor.reshape(-1, *tensor.shape[-3:])


def _beside(name: str, tensor: Tensor, query: Tensor, shares_heads: bool) -> Tensor:
    """Keys or values repeated over the leading axes of the queries, heads apart where they are shared."""
    lead = query.shape[:-3] + tensor.shape[-3:-2] if shares_heads else query.shape[:-2]
    if tensor.shape[:-2] == lead:
        return tensor
    if not shares_heads and tensor.dim() == query.dim() and tensor.shape[-3] not in (1, query.shape[-3]):
        raise ValueError(
            f"{name}: expected as many heads of key and value as of query, or enable_gqa=True, got {tensor.shape[-3]} and "
            f"{query.shape[-3]}"
        )
    return tensor.expand(*lead, *tensor.shape[-2:])
