"""The adapters of peft on the linear layers of a block: which are active, and what a program needs to know of them.

peft is not imported here: only a model that has such layers can need it, and then it is loaded.
"""

from __future__ import annotations

import math
import sys
from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ._gpt2_adapters import Adapter, Ia3, Lora, Loras
from ._gpt2_mask import NAMES
from ._gpt2_own import check_part, is_from_source
from ._gpt2_report import Unfit

# The modules inside a layer with LoRA, as far as they are known here.
LORA_MODULES = frozenset(
    "base_layer lora_dropout lora_A lora_B lora_embedding_A lora_embedding_B lora_magnitude_vector".split()
)


class Around(NamedTuple):
    """What surrounds an adapter."""

    # of what its layer takes
    dtype: torch.dtype
    device: torch.device
    # the dtype of products under autocast; none without it
    autocast: Optional[torch.dtype]


def is_wrapper(layer: Any) -> bool:
    """Whether a layer is a linear one with adapters of peft around it."""
    return _is(layer, "peft.tuners.lora.layer", "Linear") or _is(layer, "peft.tuners.ia3.layer", "Linear")


def settle(wrapper: Any) -> None:
    """Takes merged adapters out of the weights where all are disabled, as the forward of peft does."""
    if wrapper.disable_adapters and wrapper.merged:
        if torch.compiler.is_compiling():
            raise Unfit("torch.compile, and adapters that are merged and disabled")
        wrapper.unmerge()


def adapter_of(name: str, wrapper: Any, around: Around) -> Tuple[Optional[Adapter], List[torch.Tensor]]:
    """The adapter of a wrapper and its operands; nothing while it is disabled or merged into the weights."""
    if wrapper.disable_adapters or wrapper.merged:
        return None, []
    if _is(wrapper, "peft.tuners.ia3.layer", "Linear"):
        adapter, tensors = _ia3(name, wrapper)
    else:
        adapter, tensors = _loras(name, wrapper, around)
    for tensor in tensors:
        if type(tensor) is not nn.Parameter and type(tensor) is not torch.Tensor:
            raise Unfit(f"the adapter of its {name} has parameters of class {type(tensor).__name__}")
        if tensor.device != around.device:
            raise Unfit(f"the adapter of its {name} is on {tensor.device}, not on {around.device}")
        if (tensor.dtype == torch.float64) != (around.dtype == torch.float64):
            raise Unfit(f"hidden states of {around.dtype} with an adapter of {tensor.dtype}")
    return adapter, tensors


def _is(layer: Any, module: str, name: str) -> bool:
    """Whether a layer is of the very class, if that is loaded."""
    loaded = sys.modules.get(module)
    return loaded is not None and type(layer) is getattr(loaded, name, None)


def _loras(name: str, wrapper: Any, around: Around) -> Tuple[Optional[Adapter], List[torch.Tensor]]:
    if not hasattr(wrapper, "lora_variant") or not LORA_MODULES.issuperset(wrapper._modules):
        raise Unfit(f"the adapter of its {name} is from an unknown version of peft")
    found: List[Lora] = []
    tensors: List[torch.Tensor] = []
    # The dtype that the input of the next adapter has.
    dtype = around.dtype
    for active in wrapper.active_adapters:
        if active not in wrapper.lora_A:
            continue
        one, operands = _lora(name, wrapper, active, dtype, around)
        found.append(one)
        tensors += operands
        dtype = operands[0].dtype if one.casts else dtype
    return (Loras(tuple(found)) if found else None), tensors


def _lora(
    name: str, wrapper: Any, active: str, dtype: torch.dtype, around: Around
) -> Tuple[Lora, List[torch.Tensor]]:
    """One adapter, whose layer takes values of a dtype."""
    first, second = wrapper.lora_A[active], wrapper.lora_B[active]
    for part in (first, second):
        if type(part) is not nn.Linear:
            raise Unfit(f"the adapter of its {name} is a {type(part).__name__}")
        check_part(f"{name}'s adapter", part)
    operands = [first.weight, second.weight]
    if first.bias is not None or first.weight.shape[0] != second.weight.shape[1]:
        raise Unfit(f"the adapter of its {name} has an unknown form")
    if second.bias is not None:
        operands.append(second.bias)
    scaling = wrapper.scaling[active]
    if not isinstance(scaling, (int, float)) or not math.isfinite(scaling):
        raise Unfit(f"the adapter of its {name} is scaled by {scaling!r}")
    variant = wrapper.lora_variant.get(active)
    magnitude = None if variant is None else _magnitude(name, wrapper, active, variant)
    casts = bool(wrapper.cast_input_dtype_enabled)
    if around.autocast is None:
        taken = first.weight.dtype if casts else dtype
        if any(tensor.dtype != taken for tensor in operands):
            raise Unfit(f"the adapter of its {name} multiplies values of several dtypes")
    dropout = wrapper.lora_dropout[active]
    if magnitude is not None:
        operands.append(magnitude)
    for tensor in operands:
        if tensor.dtype not in NAMES:
            raise Unfit(f"the adapter of its {name} is of {tensor.dtype}")
    lora = Lora(
        rank=first.weight.shape[0],
        scaling=float(scaling),
        dtype=NAMES[first.weight.dtype],
        product=NAMES[around.autocast or first.weight.dtype],
        bias=None if second.bias is None else NAMES[second.bias.dtype],
        magnitude=None if magnitude is None else NAMES[magnitude.dtype],
        dropout=_p(name, dropout),
        casts=casts,
        multiplies_again=magnitude is not None and wrapper.training and not isinstance(dropout, nn.Identity),
    )
    if second.weight.dtype != first.weight.dtype:
        raise Unfit(f"the adapter of its {name} has matrices of several dtypes")
    if lora.dropout and magnitude is not None and not lora.multiplies_again:
        raise Unfit(f"the dropout of its {name}'s adapter is in training and its layer is not")
    return lora, operands


def _p(name: str, dropout: Any) -> float:
    if type(dropout) not in (nn.Identity, nn.Dropout):
        raise Unfit(f"the dropout of its {name}'s adapter is a {type(dropout).__name__}")
    check_part(f"{name}'s adapter", dropout)
    p = float(dropout.p) if type(dropout) is nn.Dropout and dropout.training else 0.0
    if p >= 1.0:
        raise Unfit("a dropout probability of 1")
    return p


def _magnitude(name: str, wrapper: Any, active: str, variant: Any) -> torch.Tensor:
    """The lengths that DoRA gives to the columns of a weight; other variants are refused."""
    kind = variant if isinstance(variant, type) else type(variant)
    variants, dora = sys.modules.get("peft.tuners.lora.variants"), sys.modules.get("peft.tuners.lora.dora")
    if variants is None or dora is None or kind is not getattr(variants, "DoraLinearVariant", None):
        raise Unfit(f"the adapter of its {name} is a {kind.__name__}")
    layer = wrapper.lora_magnitude_vector[active]
    if type(layer) is not dora.DoraLinearLayer:
        raise Unfit(f"the adapter of its {name} is a {type(layer).__name__}")
    check_part(f"{name}'s adapter", layer)
    methods = [(kind, "forward"), (type(layer), "get_weight_norm"), (type(layer), "get_lora_weight")]
    if any(not is_from_source(owner, method, getattr(owner, method)) for owner, method in methods):
        raise Unfit(f"the adapter of its {name} is overridden")
    if dora.ENABLE_DORA_CACHING and not layer.training:
        raise Unfit("cached DoRA norms of peft")
    if not layer.fan_in_fan_out:
        raise Unfit(f"the adapter of its {name} treats the weight as transposed")
    weight: torch.Tensor = layer.weight
    return weight


def _ia3(name: str, wrapper: Any) -> Tuple[Optional[Adapter], List[torch.Tensor]]:
    tensors = [wrapper.ia3_l[active] for active in wrapper.active_adapters if active in wrapper.ia3_l]
    if not tensors:
        return None, []
    for tensor in tensors:
        if tensor.dtype not in NAMES:
            raise Unfit(f"the adapter of its {name} is of {tensor.dtype}")
    return Ia3(bool(wrapper.is_feedforward), tuple(NAMES[tensor.dtype] for tensor in tensors)), tensors
