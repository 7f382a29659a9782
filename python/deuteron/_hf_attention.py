"""Attention of Deuteron as an implementation of transformers: `attn_implementation="deuteron"`."""

from __future__ import annotations

from typing import Any, Optional, Tuple

try:
    import torch
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface
except ImportError as error:
    raise ImportError("deuteron.register_attention needs torch and transformers: pip install torch transformers") from error

from . import functions
from ._types import Mask

NAME = "deuteron"

# What changes the result and is not computed here.
REFUSED = ("s_aux", "sinks", "cache")


def register_attention() -> None:
    """Registers `attn_implementation="deuteron"` with transformers, for every model that selects its attention by name.

    Masks are those of `sdpa`, with sliding windows in them. A soft cap and a position bias are part of the kernel on a CPU. As with `sdpa`, attention
    weights are not returned; options that are not supported (attention sinks, paged caches) raise a `ValueError`.

    >>> import deuteron, torch, transformers
    >>> deuteron.register_attention()
    >>> sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128)
    >>> config = transformers.LlamaConfig(**sizes, intermediate_size=128, attn_implementation="deuteron")
    >>> model = transformers.LlamaForCausalLM(config)
    >>> tuple(model(torch.zeros(1, 7, dtype=torch.long)).logits.shape)
    (1, 7, 128)
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    **keywords: Any,
) -> Tuple[torch.Tensor, None]:
    """What transformers calls: `[batch, heads, sequence, features]` in, `[batch, sequence, heads, features]` out."""
    for name in REFUSED:
        if keywords.get(name) is not None:
            raise ValueError(f"deuteron: attention with `{name}` is not supported; use another attn_implementation")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # One query is the last of its sequence, and sees all keys.
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    mask: Mask[torch.Tensor] = attention_mask if attention_mask is not None else "causal" if causal else "full"
    # A sliding window that hides anything comes as a mask.
    y: torch.Tensor = functions.attention(
        query,
        key,
        value,
        mask=mask,
        p=dropout,
        scale=scaling,
        soft_cap=keywords.get("softcap"),
        bias=keywords.get("position_bias"),
    )
    return y.transpose(1, 2).contiguous(), None
