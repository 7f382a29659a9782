"""The loss of a GPT-2 with a language model's head, without its logits in memory."""

from __future__ import annotations

import inspect
from typing import Any, Dict, Optional

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from . import functions
from ._gpt2_block import Patched

OWN = GPT2LMHeadModel.forward
_SIGNATURE = inspect.signature(OWN)

# What the loss of transformers leaves out, unless a call says otherwise.
IGNORED = -100


class LossForward(Patched):
    """Of a model whose caller wants the loss alone. In training with labels `logits` is None; else, all is as before."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.module()
        try:
            bound = _SIGNATURE.bind(model, *args, **kwargs).arguments
        except TypeError:
            # The model's own forward says what is wrong.
            return OWN(model, *args, **kwargs)
        labels = bound.get("labels")
        if labels is None or not model.training:
            return OWN(model, *args, **kwargs)
        others: Dict[str, Any] = bound.get("kwargs", {})
        reason = _refusal(model, bound, others)
        if reason is not None:
            return self.fall_back(model, reason, *args, **kwargs)
        named = {name: value for name, value in bound.items() if name not in ("self", "labels", "logits_to_keep", "kwargs")}
        outputs = model.transformer(**named, **others)
        loss = _loss(model, outputs.last_hidden_state, labels, others)
        kept = ("past_key_values", "hidden_states", "attentions", "cross_attentions")
        return CausalLMOutputWithCrossAttentions(loss=loss, logits=None, **{name: getattr(outputs, name) for name in kept})


def loss_refusal(model: nn.Module) -> Optional[str]:
    """Why the loss of a model cannot be computed without its logits."""
    if type(model).forward is not OWN:
        return "the forward of its class is overridden"
    if "forward" in model.__dict__:
        return "its forward is replaced"
    return _unfit_head(model)


def _unfit_head(model: Any) -> Optional[str]:
    head = model.lm_head
    if type(head) is not nn.Linear or head.bias is not None:
        return "its head is not a linear layer without a bias"
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        return "its head has hooks"
    if model.loss_function is not ForCausalLMLoss:
        return "its loss is not that of causal language models"
    return None


def _refusal(model: Any, bound: Dict[str, Any], others: Dict[str, Any]) -> Optional[str]:
    """Why a call needs the logits."""
    if type(model).forward is not OWN:
        return "the forward of its class is overridden"
    keep = bound.get("logits_to_keep", 0)
    if isinstance(keep, torch.Tensor) or keep != 0:
        return "the keyword logits_to_keep"
    if others.get("return_dict") is False or model.config.return_dict is False:
        return "a tuple is requested"
    weight = model.lm_head.weight
    if type(weight) not in (nn.Parameter, torch.Tensor) or weight.device.type not in ("cpu", "cuda"):
        return f"a head of class {type(weight).__name__} on {weight.device.type}"
    return _unfit_head(model)


def _loss(model: Any, hidden: torch.Tensor, labels: torch.Tensor, others: Dict[str, Any]) -> torch.Tensor:
    """As `ForCausalLMLoss`: labels are shifted, and the sum is over the number of items where that is given.

    Under autocast the matmul takes its operands in autocast's dtype, as that of the head does, and the loss is f32. Logits are not rounded.
    """
    ignored, count = others.get("ignore_index", IGNORED), others.get("num_items_in_batch")
    shifted = others.get("shift_labels")
    if shifted is None:
        shifted = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    shifted = shifted.reshape(-1).to(hidden.device)
    rows = hidden.reshape(-1, hidden.shape[-1])
    reduction: Any = "mean" if count is None else "sum"
    # In f32 for a model in f64 too.
    loss: torch.Tensor = functions.linear_cross_entropy(rows, model.lm_head.weight, shifted, reduction, ignored).float()
    if count is None:
        return loss
    return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)
