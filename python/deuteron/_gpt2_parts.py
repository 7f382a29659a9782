"""The modules of a block of GPT-2, and why some cannot be replaced."""

from __future__ import annotations

import inspect
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from transformers import activations
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2 import modeling_gpt2
from transformers.pytorch_utils import Conv1D

from ._gpt2_adapters import Adapter
from ._gpt2_mask import NAMES
from ._gpt2_own import check_part, forward_of, is_published
from ._gpt2_peft import Around, adapter_of, is_wrapper
from ._gpt2_report import Unfit

# The parameters of `GPT2Block.forward` that this file knows.
SIGNATURE = (
    "self",
    "hidden_states",
    "past_key_values",
    "attention_mask",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "use_cache",
    "kwargs",
)

def _activations() -> Dict[type, Tuple[str, str]]:
    """Modules of Hugging Face and torch, as composites. Those that a version of transformers lacks are left out."""
    named = {
        "NewGELUActivation": ("gelu", "kind=tanh"),
        "FastGELUActivation": ("gelu", "kind=tanh"),
        "PytorchGELUTanh": ("gelu", "kind=tanh"),
        "GELUTanh": ("gelu", "kind=tanh"),
        "GELUActivation": ("gelu", "kind=erf"),
        "SiLUActivation": ("silu", ""),
    }
    known = {getattr(activations, name): word for name, word in named.items() if hasattr(activations, name)}
    known.update({nn.ReLU: ("relu", ""), nn.SiLU: ("silu", "")})
    return known


ACTIVATIONS = _activations()


class Parts(NamedTuple):
    """The modules of a block."""

    ln_1: Any
    attn: Any
    c_attn: Any
    c_proj: Any
    attn_dropout: Any
    resid_dropout: Any
    ln_2: Any
    mlp: Any
    c_fc: Any
    mlp_proj: Any
    act: Any
    mlp_dropout: Any
    # around the linear layers: what holds their adapters, or nothing
    wrappers: Tuple[Any, ...]


# The linear layers among them.
LINEARS = ("c_attn", "c_proj", "c_fc", "mlp_proj")

# The classes of all but the wrappers. An activation may be of several.
CLASSES: Tuple[Optional[type], ...] = (
    nn.LayerNorm,
    modeling_gpt2.GPT2Attention,
    Conv1D,
    Conv1D,
    nn.Dropout,
    nn.Dropout,
    nn.LayerNorm,
    modeling_gpt2.GPT2MLP,
    Conv1D,
    Conv1D,
    None,
    nn.Dropout,
)


def parts_of(block: nn.Module) -> Parts:
    """The modules of a block as Hugging Face makes it; `Unfit` if one was replaced."""
    own = block._modules
    attn: Any = own.get("attn")
    mlp: Any = own.get("mlp")
    if type(attn) is not modeling_gpt2.GPT2Attention or type(mlp) is not modeling_gpt2.GPT2MLP:
        raise Unfit(f"its attention is a {type(attn).__name__}, its MLP a {type(mlp).__name__}")
    a, m = attn._modules, mlp._modules
    given = (a.get("c_attn"), a.get("c_proj"), m.get("c_fc"), m.get("c_proj"))
    linears, wrappers = zip(*map(_unwrapped, LINEARS, given))
    parts = Parts(
        own.get("ln_1"),
        attn,
        linears[0],
        linears[1],
        a.get("attn_dropout"),
        a.get("resid_dropout"),
        own.get("ln_2"),
        mlp,
        linears[2],
        linears[3],
        m.get("act"),
        m.get("dropout"),
        wrappers,
    )
    for name, part, expected in zip(Parts._fields, parts, CLASSES):
        if type(part) is not expected and (expected is not None or type(part) not in ACTIVATIONS):
            raise Unfit(f"its {name} is a {type(part).__name__}")
        check_part(name, part)
    return parts


def _unwrapped(name: str, layer: Any) -> Tuple[Any, Any]:
    """A linear layer, and the wrapper of its adapters if it has one."""
    if type(layer) is Conv1D or not is_wrapper(layer):
        return layer, None
    check_part(name, layer)
    return layer._modules.get("base_layer"), layer


def parameters_of(parts: Parts) -> List[torch.Tensor]:
    """In the order of the program's operands."""
    found: List[torch.Tensor] = []
    for module in (parts.ln_1, parts.c_attn, parts.c_proj, parts.ln_2, parts.c_fc, parts.mlp_proj):
        for name in ("weight", "bias"):
            tensor = module._parameters.get(name)
            if tensor is None:
                # FSDP puts views of its flat parameter there, as plain attributes.
                tensor = getattr(module, name, None)
            if tensor is None:
                raise Unfit("a norm or a linear layer lacks its weight or bias")
            found.append(tensor)
    return found


def adapters_of(parts: Parts, around: Around) -> Tuple[Tuple[Optional[Adapter], ...], List[torch.Tensor]]:
    """The adapters of the linear layers, and their operands in order."""
    if all(wrapper is None for wrapper in parts.wrappers):
        return (None,) * len(LINEARS), []
    found: List[Optional[Adapter]] = []
    tensors: List[torch.Tensor] = []
    for name, wrapper in zip(LINEARS, parts.wrappers):
        adapter, operands = (None, []) if wrapper is None else adapter_of(name, wrapper, around)
        found.append(adapter)
        tensors += operands
    return tuple(found), tensors


def has_own_forward(block: nn.Module) -> bool:
    """Whether the class of a block computes what GPT2Block was published with."""
    published = modeling_gpt2.GPT2Block
    return is_published(published) and (type(block) is published or forward_of(type(block)) is forward_of(published))


def block_refusal(block: nn.Module) -> Optional[str]:
    """Why a block cannot be replaced."""
    known = inspect.signature(modeling_gpt2.GPT2Block.forward)
    if tuple(known.parameters) != SIGNATURE or known.return_annotation not in (torch.Tensor, "torch.Tensor"):
        return "the GPT2Block of this version of transformers is unknown"
    if not has_own_forward(block) or "forward" in block.__dict__:
        return "its forward is overridden"
    if "crossattention" in block._modules:
        return "it has cross attention"
    act = getattr(block._modules.get("mlp"), "act", None)
    if type(act) not in ACTIVATIONS:
        return f"its activation is a {type(act).__name__}"
    try:
        parts = parts_of(block)
        tensors = parameters_of(parts)
        if parts.attn.reorder_and_upcast_attn:
            return "reorder_and_upcast_attn is set"
        check_attention(parts.attn)
        adapters_of(parts, Around(tensors[0].dtype, tensors[0].device, None))
    except Unfit as unfit:
        return str(unfit)
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or not dtypes <= set(NAMES):
        return "its parameters are of " + ", ".join(sorted(map(str, dtypes)))
    return None


def check_attention(attn: modeling_gpt2.GPT2Attention) -> str:
    """How transformers would compute it; `Unfit` if that is not what the program does."""
    # Reading a config by its own rules takes longer than all else that is checked; compilers know no others.
    config = attn.config.__dict__ if torch.compiler.is_compiling() else object.__getattribute__(attn.config, "__dict__")
    implementation = config.get("_attn_implementation_internal") or str(attn.config._attn_implementation)
    if implementation not in ("eager", "sdpa") and not implementation.startswith("flash_attention"):
        raise Unfit(f"its attention is implemented by {implementation}")
    if _attention_function(str(implementation)) is not OWN_ATTENTION.get(str(implementation)):
        raise Unfit(f"the attention function {implementation} of transformers is replaced")
    if not attn.is_causal or not config.get("is_causal", True):
        raise Unfit("its attention is not causal")
    return str(implementation)


def _attention_function(implementation: str) -> Any:
    """What transformers calls for an implementation."""
    if implementation == "eager" and "eager" not in ALL_ATTENTION_FUNCTIONS:
        return modeling_gpt2.eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get(implementation)


def _own_attention() -> Dict[str, Any]:
    """The functions that transformers was published with; those that had been replaced before are left out."""
    known = {name: _attention_function(name) for name in ("eager", *ALL_ATTENTION_FUNCTIONS)}
    return {
        name: function
        for name, function in known.items()
        if str(getattr(function, "__globals__", {}).get("__name__")).startswith("transformers.")
    }


OWN_ATTENTION = _own_attention()


def head_refusal(head: nn.Module) -> Optional[str]:
    """Why a head over the vocabulary cannot be replaced."""
    if type(head) is not nn.Linear:
        return f"it is a {type(head).__name__}"
    overridden = "forward" in head.__dict__ or not is_published(nn.Linear)
    return "its forward is overridden" if overridden else None


def norm_refusal(norm: nn.Module) -> Optional[str]:
    """Why a final norm cannot be replaced."""
    if type(norm) is not nn.LayerNorm:
        return f"it is a {type(norm).__name__}"
    if "forward" in norm.__dict__ or not is_published(nn.LayerNorm):
        return "its forward is overridden"
    if norm.weight is None or norm.bias is None or len(norm.normalized_shape) != 1:
        return "it has no weight or no bias, or is over several axes"
    if norm.weight.dtype not in NAMES:
        return f"its parameters are of {norm.weight.dtype}"
    return None
