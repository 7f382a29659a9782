"""Converts attention masks of Hugging Face to those of Deuteron."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from ._gpt2_program import Mask
from ._gpt2_report import Unfit

# Dtypes in the text of a graph. A graph of f32 over operands of f64 is interpreted in f64.
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f32"}


# Eager masks hold the lowest float, which a kernel that takes powers of 2 scales beyond the finite ones. A row of -inf
# gives zeros, and not the mean that equal scores give. This one is as good: no score changes it.
LOWEST = -(2.0**126)

# Gradients take probabilities from scores and the logarithm of their sum again; far below 0 that has no digits left.
SHALLOW = -256.0


class MaskMemo:
    """Remembers the last converted mask: all blocks of a model get the same one."""

    def __init__(self) -> None:
        # the mask, its version, and what was made of it
        self._last: Optional[Tuple[weakref.ref[torch.Tensor], int, Dict[Any, Any]]] = None

    def __reduce__(self) -> Tuple[Any, ...]:
        return MaskMemo, ()

    def get(self, mask: torch.Tensor, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for a mask, its contents and a key."""
        version = 0 if mask.is_inference() else mask._version
        last = self._last
        if last is None or last[0]() is not mask or last[1] != version:
            last = self._last = (weakref.ref(mask), version, {})
        if key not in last[2]:
            last[2][key] = make()
        return last[2][key]


def additive(
    mask: Any, sizes: Tuple[int, int, int, int], columns: int, like: torch.Tensor
) -> Tuple[Mask, torch.Tensor]:
    """A mask to add to scores of `sizes` (batch, heads, queries, keys), with keys up to `columns` hidden."""
    check(mask, sizes, like)
    batch, heads, queries, keys = mask.shape
    if mask.dtype == torch.bool:
        added = torch.zeros((batch, heads, queries, columns), dtype=like.dtype, device=like.device)
        added[..., :keys].masked_fill_(~mask, -torch.inf)
        added[..., keys:] = -torch.inf
    else:
        if mask.dtype == torch.float16:
            # Scores in f32 change the lowest f16, scores in f16 do not.
            mask = torch.where(mask == torch.finfo(mask.dtype).min, LOWEST, mask.float())
        added = torch.nn.functional.pad(mask, (0, columns - keys), value=-torch.inf).contiguous()
        if torch.finfo(added.dtype).min < LOWEST:
            added = torch.where(added == -torch.inf, added, added.clamp(min=LOWEST))
    return Mask("additive", NAMES[added.dtype], tuple(added.shape)), added


def check(mask: Any, sizes: Tuple[int, int, int, int], like: torch.Tensor) -> None:
    """Refuses a tensor that cannot be a mask of these scores."""
    if not isinstance(mask, torch.Tensor):
        raise Unfit(f"an attention mask of class {type(mask).__name__}")
    if mask.ndim != 4:
        raise Unfit(f"an attention mask of rank {mask.ndim}, not 4")
    batch, heads, queries, keys = sizes
    if mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, heads) or tuple(mask.shape[2:]) != (queries, keys):
        raise Unfit(f"an attention mask of shape {list(mask.shape)}, not {list(sizes)}")
    if mask.dtype != torch.bool and mask.dtype not in NAMES:
        raise Unfit(f"an attention mask of {mask.dtype}")
    if mask.requires_grad:
        raise Unfit("an attention mask with a gradient")
    if mask.device != like.device:
        raise Unfit(f"an attention mask on {mask.device}, not on {like.device}")


def hides_rows(mask: torch.Tensor) -> bool:
    """Whether a float mask hides all keys of a query, by finite numbers. Reads the mask."""
    if mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    most = mask.amax(-1)
    return bool(((most < SHALLOW) & (most > -torch.inf)).any())


def is_causal(mask: torch.Tensor) -> bool:
    """Whether a float mask hides what comes later, and nothing else. Reads the mask, so on a GPU it waits for it."""
    if mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    queries, keys = mask.shape[2:]
    lowest = torch.full((), torch.finfo(mask.dtype).min, dtype=mask.dtype, device=mask.device)
    visible = torch.ones((queries, keys), dtype=torch.bool, device=mask.device).tril(keys - queries)
    return torch.equal(mask, torch.where(visible, torch.zeros_like(lowest), lowest).expand_as(mask))
