"""Converts arguments of the catalogue's functions: attributes, seeds, masks, biases of norms."""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, Literal, NamedTuple, Optional, Sequence, Union

from . import _call

Tensor = Any
"""A tensor of PyTorch, an array of NumPy, or an object with `__dlpack__`."""

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
"""`gelu` is the form with `erf`, which is also torch's default; `gelu_tanh` is the approximation."""

Norm = Literal["layer", "rms"]

Reduction = Literal["mean", "sum", "none"]

MaskWord = Literal["full", "causal", "causal_from_end"]
"""`causal`: query `i` sees the keys up to `i`, as in torch; `causal_from_end`: the last query sees all keys. They differ where there are
fewer or more keys than queries."""

Mask = Union[None, MaskWord, Tensor]
"""A word, truth values (true: attend), or floats that are added to the scores."""

# The words of the engine, whose plain GELU is that of GPT-2.
_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_tanh": "gelu", "silu": "silu", "relu": "relu", "none": "none"}
_MASKS = ("full", "causal", "causal_from_end")


def op_text(name: str, attributes: dict[str, Any]) -> str:
    """An op with its attributes, in the engine's words."""
    text = name
    for key, value in attributes.items():
        if key == "act":
            value = _activation(name, value)
        if isinstance(value, str) and not value.isidentifier():
            raise ValueError(f"{name}: expected one word or a number for {key}, got {value!r}")
        text += f" {key}={str(value).lower() if isinstance(value, bool) else value}"
    return text


def _activation(name: str, act: Any) -> str:
    if act not in _ACTIVATIONS:
        raise ValueError(f"{name}: expected act to be gelu (by erf), gelu_tanh, silu or relu, got {act!r}")
    return _ACTIVATIONS[act]


def check_probability(name: str, p: float, training: bool) -> float:
    """The share that is dropped: none outside of training."""
    if not isinstance(p, (int, float)) or isinstance(p, bool):
        raise TypeError(f"{name}: expected a number for p, got {type(p).__name__}")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name}: expected p of at least 0 and below 1, got {p}")
    return float(p) if training else 0.0


def shape_of(name: str, label: str, operand: Tensor) -> Sequence[int]:
    """The sizes of an operand that is looked at before the engine does."""
    shape = getattr(operand, "shape", None)
    if shape is None:
        raise TypeError(f"{name}: `{label}`: expected a tensor, got {type(operand).__name__}")
    return shape  # type: ignore[no-any-return]


def _is_torch(operand: Tensor) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(operand, torch.Tensor)


def _is_traced(operand: Tensor) -> bool:
    return _call.traced is not None and isinstance(operand, _call.traced[0])


# Seeds.


def seed_of(name: str, like: Tensor, seed: Union[None, int, Tensor], p: float) -> Tensor:
    """The seed as a tensor of one i32 beside another tensor. Where none is given, the generator of the library draws one."""
    if seed is not None and not isinstance(seed, int):
        return seed
    if _is_torch(like):
        torch = sys.modules["torch"]
        if p == 0.0:
            # Nobody reads it.
            return like.new_empty((), dtype=torch.int32)
        if seed is None:
            # A compiler keeps an eye on what it read, and loading `_torch` changes `_call.draw`.
            draw = None if _call.is_compiling() else _call.draw
            return (draw or _load_draw())(like)
        return torch.full((), _wrapped(seed), dtype=torch.int32, device=like.device)
    if _is_traced(like):
        if seed is None and p > 0.0:
            raise TypeError(f"{name}: expected a seed that is an argument of the function, got none; `fuse` draws none")
        from . import trace

        return trace.full((), _wrapped(seed or 0), "i32", like=like)
    import numpy

    drawn = numpy.random.randint(-(2**31), 2**31 - 1) if seed is None and p > 0.0 else _wrapped(seed or 0)
    return numpy.asarray(drawn, dtype=numpy.int32)


def _load_draw() -> Callable[[Tensor], Tensor]:
    from ._torch import draw

    return draw


def _wrapped(seed: int) -> int:
    """A whole number as an i32 of the same low bits."""
    return (seed + 2**31) % 2**32 - 2**31


# Norms.


def bias_of_norm(name: str, norm: str, w: Tensor, b: Optional[Tensor]) -> Optional[Tensor]:
    """The bias for the engine: a layer norm gets one (zeros if none is given), an RMS norm none."""
    if norm == "layer":
        return _zeros_like(name, w) if b is None else b
    if norm != "rms":
        raise ValueError(f"{name}: expected norm='layer' or norm='rms', got {norm!r}")
    if b is not None:
        raise ValueError(f"{name}: expected no `b` with norm='rms', which adds none; leave it out, or say norm='layer'")
    return None


def _zeros_like(name: str, w: Tensor) -> Tensor:
    shape = shape_of(name, "w", w)
    if _is_torch(w):
        return w.new_zeros(shape)
    if _is_traced(w):
        from . import trace

        return trace.full(shape, 0.0, w._word, like=w)
    import numpy

    return numpy.zeros(shape, w.dtype)


# Masks.


def mask_word(name: str, mask: Optional[str], q: Tensor, k: Tensor) -> str:
    """The engine's word of a mask where none can be added."""
    if mask is not None and not isinstance(mask, str):
        raise TypeError(f"{name}: expected a mask that is None, 'full', 'causal' or 'causal_from_end', got {type(mask).__name__}")
    queries, keys = shape_of(name, "q", q)[-2:-1], shape_of(name, "k", k)[-2:-1]
    if mask == "causal" and tuple(queries) != tuple(keys):
        raise ValueError(
            f"{name}: expected as many keys as queries with mask='causal', got {list(keys)} and {list(queries)}; with "
            "mask='causal_from_end' the last query sees all keys"
        )
    return _word(name, mask)


def mask_of(name: str, mask: Mask, like: Tensor, sizes: Sequence[int]) -> tuple[str, list[Tensor]]:
    """The engine's word of a mask for scores of `sizes` (the last two are queries and keys), and the operand where it is added.
    `like` is of the dtype of what is masked."""
    if mask is not None and not isinstance(mask, str):
        return "additive", [_added(name, mask, like)]
    word = _word(name, mask)
    if mask == "causal" and len(sizes) > 1 and sizes[-2] != sizes[-1]:
        return "additive", [_triangle(like, sizes[-2], sizes[-1])]
    return word, []


def _word(name: str, mask: Optional[str]) -> str:
    if mask is not None and mask not in _MASKS:
        raise ValueError(
            f"{name}: expected a mask that is None, 'full', 'causal', 'causal_from_end' or a tensor, got {mask!r}"
        )
    return "full" if mask is None or mask == "full" else "causal"


def _added(name: str, mask: Tensor, like: Tensor) -> Tensor:
    """A mask of truth values or floats as floats that are added."""
    if _is_torch(mask):
        torch = sys.modules["torch"]
        if mask.dtype == torch.bool:
            return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask.logical_not(), -math.inf)
        is_float = mask.is_floating_point()
    elif _is_traced(mask):
        if mask._word == "bool":
            return _hidden_unless(mask, like)
        is_float = mask.is_floating_point()
    else:
        if not hasattr(mask, "dtype") and hasattr(mask, "__dlpack__"):
            import numpy

            mask = numpy.from_dlpack(mask)
        kind = getattr(getattr(mask, "dtype", None), "kind", "")
        if kind == "b":
            import numpy

            return numpy.where(mask, 0.0, -math.inf).astype(like.dtype)
        is_float = kind not in ("i", "u")
    if not is_float:
        raise TypeError(
            f"{name}: `mask`: expected truth values (true: attend) or floats that are added to the scores, got {mask.dtype}"
        )
    return mask


class ScoreWork(NamedTuple):
    """Operands of masks and of work on scores, in the engine's order, and which of slopes, a bias and documents there are."""

    operands: list[Tensor]
    flags: tuple[str, str, str]


def score_work(
    mask: Mask,
    added: tuple[str, list[Tensor]],
    lengths: Sequence[int],
    slopes: Optional[Tensor],
    bias: Optional[Tensor],
    documents: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
) -> ScoreWork:
    """The operands of attention after its values: what a mask adds, slopes, a bias, documents."""
    operands: list[Tensor] = list(added[1])
    if cu_seqlens is not None:
        if documents is not None:
            raise ValueError("attention: expected `documents` or `cu_seqlens`, got both")
        documents = _documents_of(cu_seqlens, lengths[-1])
    if slopes is not None:
        shape = shape_of("attention", "slopes", slopes)
        if len(shape) == 1:
            slopes = slopes.reshape((shape[0], 1, 1))
        operands.append(_single(slopes))
    if bias is not None and isinstance(mask, str) and mask == "causal" and list(shape_of("attention", "bias", bias)[-1:]) > list(lengths[-1:]):
        # Keys beyond the queries are cut off, as no query sees them.
        bias = bias[..., : lengths[-1]]
    if bias is not None and operands[:1] and added[0] == "additive":
        # Two things that are added are one.
        operands[0], bias = operands[0] + bias, None
    if bias is not None:
        operands.append(bias)
    if documents is not None:
        operands.append(documents)
    flags = [str(operand is not None).lower() for operand in (slopes, bias, documents)]
    return ScoreWork(operands, (flags[0], flags[1], flags[2]))


def check_score_limits(
    mask: Mask, lengths: Sequence[int], keys: tuple[int, ...], window: Optional[int], soft_cap: Optional[float], work: ScoreWork
) -> tuple[Union[float, str], Union[int, str]]:
    """Checks the soft cap and the window, and returns them for the engine."""
    placed = window is not None or work.flags[0] == "true" or work.flags[2] == "true"
    square = len(set(lengths)) < 2 and lengths[-1:] == keys
    if placed and isinstance(mask, str) and mask == "causal" and not square:
        raise ValueError(
            "attention: expected as many keys as queries with mask='causal' beside a window, slopes or documents, got "
            f"{list(keys)} and {list(lengths[:1])}; with mask='causal_from_end' the last query's own key is the last"
        )
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"attention: expected a window of at least 1, got {window!r}")
    if soft_cap is not None and not 1e-30 <= soft_cap <= 1e30:
        raise ValueError(f"attention: expected a soft_cap from 1e-30 to 1e30, got {soft_cap!r}")
    return ("none" if soft_cap is None else float(soft_cap), "none" if window is None else window)


def _single(slopes: Tensor) -> Tensor:
    """Slopes as float32, which the engine takes beside operands of any dtype."""
    if _is_torch(slopes):
        return slopes.float()
    return slopes if _is_traced(slopes) or str(slopes.dtype) == "float32" else slopes.astype("float32")


def _documents_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """The sequence of each token of a row, where sequences start at all numbers but the last, which is the end of the last."""
    if _is_torch(cu_seqlens):
        torch = sys.modules["torch"]
        places = torch.arange(tokens, device=cu_seqlens.device)
        return torch.bucketize(places, cu_seqlens.contiguous(), right=True, out_int32=True)
    if _is_traced(cu_seqlens):
        raise TypeError("attention: expected `documents` of a traced function, got `cu_seqlens`")
    import numpy

    return numpy.searchsorted(numpy.asarray(cu_seqlens), numpy.arange(tokens), side="right").astype(numpy.int32)


def _triangle(like: Tensor, queries: int, keys: int) -> Tensor:
    """What hides the keys after each query's own place, counted from the first."""
    if _is_torch(like):
        torch = sys.modules["torch"]
        return torch.full((queries, keys), -math.inf, dtype=like.dtype, device=like.device).triu(1)
    if _is_traced(like):
        from . import trace

        return _hidden_unless(trace.arange(keys, like=like) <= trace.arange(queries, like=like).unsqueeze(1), like)
    import numpy

    return numpy.where(numpy.tri(queries, keys, dtype=bool), 0.0, -math.inf).astype(like.dtype)


def _hidden_unless(seen: Tensor, like: Tensor) -> Tensor:
    from . import trace

    return trace.where(seen, 0.0, -math.inf).to(like)


def keys_seen(mask: Mask, q: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
    """Keys and values without those that a causal mask hides from all queries."""
    queries, keys = q.shape[-2:-1], tensors[0].shape[-2:-1]
    if not isinstance(mask, str) or mask != "causal" or not queries or not keys or keys[0] <= max(queries[0], 1):
        return tensors
    # Attention has one key at least, also where no query asks for it.
    return [tensor[..., : max(queries[0], 1), :] if hasattr(tensor, "__getitem__") else tensor for tensor in tensors]
