"""Hugging Face's GPT-2 on fused kernels: `patch`, `unpatch`, `patched`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Dict, Iterator, List, Optional, Tuple, Type

try:
    import torch
    from transformers.models.gpt2 import modeling_gpt2
except ImportError as error:
    raise ImportError("deuteron.patch needs torch and transformers: pip install torch transformers") from error

from ._gpt2_block import ALIGNED, BlockForward, HeadForward, NormForward, Patched
from ._gpt2_loss import LossForward, loss_refusal
from ._gpt2_mask import MaskMemo
from ._gpt2_parts import block_refusal, head_refusal, norm_refusal
from ._gpt2_report import Report

__all__ = ["Report", "patch", "patched", "unpatch"]


def patch(model: torch.nn.Module, strict: bool = False, skip_logits: bool = False) -> Report:
    """Patches a Hugging Face GPT-2 in place: its blocks and final norm run as fused kernels, and its head with aligned weights.

    `model` is a `GPT2Model` or contains one: a `GPT2LMHeadModel`, another head, a wrapper of DDP or FSDP, a `PeftModel`.
    Parameters, state dict, module types and hooks are unchanged; only the `forward` of those modules is replaced. LoRA,
    DoRA and IA3 of peft run as part of their block, whether they are added before or after patching. A module that cannot be replaced
    is left as it is, and the report says why; with `strict` that is a `ValueError`, and nothing is changed. Patching twice has
    no effect.
    Transformers models return logits with every loss, which take most of the memory of a step with a large
    vocabulary. With `skip_logits` a `GPT2LMHeadModel` in training mode with labels computes the loss without them, and
    its `logits` are None.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> import deuteron
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128))
    >>> report = deuteron.patch(model, strict=True)
    >>> report.replaced
    ['transformer.h.0', 'transformer.h.1', 'transformer.ln_f']
    >>> deuteron.unpatch(model)
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"patch: expected a torch.nn.Module, got {type(model).__name__}")
    found = _candidates(model, skip_logits)
    replaced, left, fresh = [], [], []
    for name, module, kind in found:
        known = isinstance(module.__dict__.get("forward"), Patched)
        reason = None if known else REFUSALS[kind](module)
        if reason is not None:
            left.append((name, reason))
            continue
        replaced.append(name)
        if not known:
            fresh.append((module, kind))
    if not found:
        left.append((type(model).__name__, "it contains no GPT2Model of transformers"))
    if strict and left:
        raise ValueError("patch: cannot replace " + "; ".join(f"{name}: {reason}" for name, reason in left))
    earlier = _forwards(model)
    report, memo = (earlier[0].report, earlier[0].memo) if earlier else (Report(), MaskMemo())
    report.replaced[:], report.left[:] = replaced, left
    for module, kind in fresh:
        setattr(module, "forward", kind(module, report, memo))
    return report


def unpatch(model: torch.nn.Module) -> None:
    """Restores the original `forward` of the modules of a patched model. Other models are not changed."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), Patched):
            del module.forward


@contextmanager
def patched(model: torch.nn.Module, strict: bool = False, skip_logits: bool = False) -> Iterator[Report]:
    """Patches a model within a `with` block, and restores it afterwards.

    >>> from transformers import GPT2Config, GPT2Model
    >>> import deuteron
    >>> model = GPT2Model(GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=128))
    >>> with deuteron.patched(model) as report:
    ...     bool(report)
    True
    """
    before = bool(_forwards(model)) if isinstance(model, torch.nn.Module) else False
    report = patch(model, strict, skip_logits)
    try:
        yield report
    finally:
        if not before:
            unpatch(model)


REFUSALS: Dict[Type[Patched], Callable[[torch.nn.Module], Optional[str]]] = {
    BlockForward: block_refusal,
    NormForward: norm_refusal,
    HeadForward: head_refusal,
    LossForward: loss_refusal,
}


def _candidates(model: torch.nn.Module, skip_logits: bool) -> List[Tuple[str, torch.nn.Module, Type[Patched]]]:
    """Blocks, final norms, heads with unaligned rows, and models whose loss skips the logits, by name."""
    found: List[Tuple[str, torch.nn.Module, Type[Patched]]] = []
    norms = {id(own.ln_f) for own in model.modules() if isinstance(own, modeling_gpt2.GPT2Model)}
    heads = {id(head) for head in map(_head, model.modules()) if head is not None and head.weight.shape[0] % ALIGNED}
    for name, module in model.named_modules():
        if isinstance(module, modeling_gpt2.GPT2Block):
            found.append((name, module, BlockForward))
        elif id(module) in norms:
            found.append((name, module, NormForward))
        elif id(module) in heads:
            found.append((name, module, HeadForward))
        elif skip_logits and isinstance(module, modeling_gpt2.GPT2LMHeadModel):
            found.append((name or type(module).__name__, module, LossForward))
    return found


def _head(model: torch.nn.Module) -> Optional[torch.nn.Linear]:
    """The head over the vocabulary of a model that has one."""
    kinds = (modeling_gpt2.GPT2LMHeadModel, modeling_gpt2.GPT2DoubleHeadsModel)
    head = model.lm_head if isinstance(model, kinds) else None
    return head if isinstance(head, torch.nn.Linear) else None


def _forwards(model: torch.nn.Module) -> List[Patched]:
    found = (module.__dict__.get("forward") for module in model.modules())
    return [forward for forward in found if isinstance(forward, Patched)]
