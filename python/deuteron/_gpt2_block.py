"""The forward of a patched block: one program in place of a dozen modules."""

from __future__ import annotations

import weakref
from copy import deepcopy
from functools import partial
from typing import Any, Dict, Optional, Sequence, Tuple, Union

import torch
from torch import nn
from transformers import modeling_layers
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from ._call import run
from ._gpt2_cache import GrowingLayer, positions
from ._gpt2_mask import NAMES, MaskMemo, additive, check, hides_rows, is_causal
from ._gpt2_own import forward_of, is_published
from ._gpt2_parts import ACTIVATIONS, adapters_of, check_attention, has_own_forward, parameters_of, parts_of
from ._gpt2_peft import Around, settle
from ._gpt2_program import CACHED, CAUSAL, FULL, RETURNED, Block, Mask, Past, program
from ._gpt2_report import Report, Unfit
from ._native import Program
from ._torch import draw

# Keywords that reach a block and change nothing in it.
HARMLESS = frozenset(
    ("position_ids", "cache_position", "output_hidden_states", "return_dict", "num_items_in_batch", "token_type_ids")
)

# Elements of 16 bits in a vector of a GPU.
ALIGNED = 8

# The least number of rows at which a padded weight pays.
PADDED_ROWS = 64

# Programs that a block remembers, at most; the oldest is dropped.
REMEMBERED = 256


class Patched:
    """The `forward` of a patched module. It is copied and pickled with the module."""

    def __init__(self, module: nn.Module, report: Report, memo: MaskMemo) -> None:
        # The module holds this object; a reference back would keep its memory until the collector runs.
        self._module = weakref.ref(module)
        self.report = report
        self.memo = memo

    def module(self) -> Any:
        module = self._module()
        if module is None:
            raise ReferenceError("the patched module is gone")
        return module

    def __deepcopy__(self, memo: Dict[int, Any]) -> Patched:
        module = memo.get(id(self.module()))
        if module is None:
            raise TypeError("a patched forward is copied with its module, not alone")
        return type(self)(module, deepcopy(self.report, memo), deepcopy(self.memo, memo))

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.module(), self.report, self.memo)

    def fall_back(self, module: Any, reason: str, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. Where that of a block checkpoints, this happens inside of the checkpoint."""
        self.report.count(reason)
        return forward_of(type(module))(module, *args, **kwargs)


class NormForward(Patched):
    """Of the final norm."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        norm = self.module()
        reason = _unfit_tensor(input)
        if reason is None and not is_published(nn.LayerNorm):
            reason = "the forward of LayerNorm is overridden"
        if reason is None and input.dtype != norm.weight.dtype:
            reason = f"a norm of {input.dtype} with weights of {norm.weight.dtype}"
        if reason is None and input.dtype.itemsize == 2 and torch.is_autocast_enabled(input.device.type):
            reason = f"a norm of {input.dtype} under autocast, which widens it"
        if reason is None:
            return _run(f"layer_norm eps={norm.eps!r}", (input, norm.weight, norm.bias))[0]
        normed: torch.Tensor = self.fall_back(norm, reason, input)
        return normed


class HeadForward(Patched):
    """The forward of a head whose vocabulary is not a multiple of the vector width, such as GPT-2's.

    A 16-bit matmul with unaligned rows is slow on a GPU, so the weight is padded first. With few rows, the
    weight is read once, and padding it would cost more.
    """

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        head = self.module()
        if not is_published(nn.Linear):
            replaced: torch.Tensor = self.fall_back(head, "the forward of Linear is overridden", input)
            return replaced
        weight, bias = head.weight, head.bias
        if input.device.type not in ("cpu", "cuda"):
            return nn.functional.linear(input, weight, bias)
        compute = _compute_dtype(input)
        rows = input.numel() // max(input.shape[-1], 1)
        if input.device.type != "cuda" or compute.itemsize != 2 or rows < PADDED_ROWS:
            return nn.functional.linear(input, weight, bias)
        classes = weight.shape[0]
        missing = -classes % ALIGNED
        padded = nn.functional.pad(weight.to(compute), (0, 0, 0, missing))
        shift = None if bias is None else nn.functional.pad(bias.to(compute), (0, missing))
        return nn.functional.linear(input, padded, shift)[..., :classes]


class BlockForward(Patched):
    """Of a block."""

    def __init__(self, module: nn.Module, report: Report, memo: MaskMemo) -> None:
        super().__init__(module, report, memo)
        self._programs: Dict[Any, Program] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        block = self.module()
        result: torch.Tensor
        if not has_own_forward(block):
            self.report.count("the forward of GPT2Block is overridden")
            result = type(block).forward(block, *args, **kwargs)
        elif _checkpoints(block):
            whole = partial(self.whole, **_without_cache(block, kwargs))
            result = block._gradient_checkpointing_func(whole, *args)
        else:
            result = self.whole(*args, **kwargs)
        return result

    def whole(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Optional[Cache] = None,
        attention_mask: Optional[torch.Tensor] = None,
        encoder_hidden_states: Optional[torch.Tensor] = None,
        encoder_attention_mask: Optional[torch.Tensor] = None,
        use_cache: Optional[bool] = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        block = self.module()
        try:
            _check_call(hidden_states, encoder_hidden_states, kwargs)
            return self.fused(Call(block, hidden_states), past_key_values, attention_mask)
        except Unfit as unfit:
            reason = str(unfit)
        result: torch.Tensor = self.fall_back(
            block,
            reason,
            hidden_states,
            past_key_values,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            use_cache=use_cache,
            **kwargs,
        )
        return result

    def fused(self, call: Call, cache: Optional[Cache], mask: Any) -> torch.Tensor:
        """The block as one program. Nothing is changed before it is known to fit."""
        if cache is None:
            return self.run(call, *self.mask(call, mask, call.sequence), None)[0]
        layer = _layer(cache, call.attn.layer_idx)
        if not isinstance(layer, StaticLayer) and layer.get_seq_length() == 0:
            return self.start(call, layer, mask)
        if torch.compiler.is_compiling():
            raise Unfit("torch.compile with a non-empty cache")
        if isinstance(layer, GrowingLayer) and call.differentiates(layer):
            return self.join(call, layer, mask)
        # Where a compiler gave up on what calls us, it must not begin here: what is written in place it does not see.
        step: Any = self.static_step if isinstance(layer, StaticLayer) else self.step
        stepped: torch.Tensor = step(call, layer, mask)
        return stepped

    def start(self, call: Call, layer: GrowingLayer, mask: Any) -> torch.Tensor:
        """The first tokens of a cache: it holds views of the projection."""
        y, qkv = self.run(call, *self.mask(call, mask, call.sequence), RETURNED)[:2]
        split = qkv.view(call.batch, call.sequence, 3, call.heads, -1).permute(2, 0, 3, 1, 4)
        layer.take(split[1], split[2])
        return y

    def join(self, call: Call, layer: GrowingLayer, mask: Any) -> torch.Tensor:
        """More tokens with gradients: earlier keys and values are operands, and all keys and values are results."""
        if call.sequence == 1:
            # Each length is a program of its own, which pays for a batch of texts and not for a text token by token.
            raise Unfit("gradients of a single token through a cache")
        keys, values, length = layer.keys, layer.values, layer.get_seq_length()
        if keys is None or values is None or keys.shape != values.shape:
            raise Unfit("a cache whose keys and values differ in shape")
        call.check_cache(layer.shape(), keys, values)
        what, mask = self.mask(call, mask, length + call.sequence)
        if mask is None and call.implementation != "eager":
            raise Unfit("gradients through a cache without a mask")
        y, keys, values = self.run(call, what, mask, Past("joined", length), (keys, values))
        layer.take(keys, values)
        return y

    @torch.compiler.disable
    def step(self, call: Call, layer: GrowingLayer, mask: Any) -> torch.Tensor:
        """More tokens: their keys and values are written behind those of the cache."""
        call.check_in_place(layer)
        length = layer.get_seq_length()
        call.check_cache(layer.shape())
        buffer = layer.room(call.sequence, lambda: int(call.attn.config.max_position_embeddings))
        call.check_cache(layer.shape(), buffer)
        what, mask = self.mask(call, mask, length + call.sequence, buffer.shape[3])
        place = positions(call.x.device, call.batch, length)
        y = self.run(call, what, mask, Past("joint", buffer.shape[3]), (buffer,), place)[0]
        layer.grow(call.sequence)
        return y

    @torch.compiler.disable
    def static_step(self, call: Call, layer: Any, mask: Any) -> torch.Tensor:
        """Tokens with a cache of fixed size, whose length is known only on the device."""
        call.check_in_place(layer)
        if not layer.is_initialized:
            empty = call.x.new_zeros((call.batch, call.heads, 0, call.hidden // call.heads), dtype=call.compute)
            layer.lazy_initialization(empty, empty)
        keys, values = layer.keys, layer.values
        size = keys.shape[2]
        call.check_cache((keys.shape[0], keys.shape[1], keys.shape[3]), keys, values)
        if call.x.device.type == "cpu" and int(layer.cumulative_length) + call.sequence > size:
            raise IndexError(f"a static cache of {size} tokens is full")
        what, mask = self.mask(call, mask, size, size)
        place = layer.cumulative_length.to(torch.int32).expand(call.batch).contiguous()
        y = self.run(call, what, mask, Past("apart", size), (keys, values), place)[0]
        layer.cumulative_length.add_(call.sequence)
        return y

    def mask(self, call: Call, mask: Any, keys: int, columns: int = 0) -> Tuple[Mask, Optional[torch.Tensor]]:
        """The mask of attention; with a cache, it has `columns` columns."""
        hidden_later = CACHED if columns else CAUSAL
        if mask is None:
            if call.implementation != "eager" or call.sequence == 1:
                return hidden_later, None
            # Eager attention without a mask sees all; the models of transformers never call it so.
            if columns:
                raise Unfit("eager attention over a cache without a mask")
            return FULL, None
        sizes = (call.batch, call.heads, call.sequence, keys)
        check(mask, sizes, call.x)
        if call.implementation == "eager" and mask.dtype == torch.bool:
            raise Unfit("eager attention with a boolean mask, which it adds as 0 and 1")
        like = call.x if call.x.dtype == call.compute else call.x.new_empty((), dtype=call.compute)
        if torch.compiler.is_compiling():
            # Neither read nor remembered.
            if mask.dtype.is_floating_point and call.differentiates():
                raise Unfit("torch.compile, and gradients with a float mask")
            return additive(mask, sizes, columns or keys, like)
        if call.implementation == "eager" and mask.dtype.is_floating_point:
            # Here even a plain causal mask is written out.
            if self.memo.get(mask, "causal", lambda: is_causal(mask)):
                return hidden_later, None
        if mask.dtype.is_floating_point and call.differentiates():
            if self.memo.get(mask, "rows", lambda: hides_rows(mask)):
                raise Unfit("gradients with a float mask that hides all keys of a query")
        key = (columns, like.dtype)
        made: Tuple[Mask, torch.Tensor] = self.memo.get(mask, key, lambda: additive(mask, sizes, columns or keys, like))
        return made

    def run(
        self,
        call: Call,
        what: Mask,
        mask: Optional[torch.Tensor],
        past: Optional[Past],
        states: Tuple[torch.Tensor, ...] = (),
        place: Optional[torch.Tensor] = None,
    ) -> Sequence[torch.Tensor]:
        operands = [call.x]
        if call.draws():
            operands.append(draw(call.x))
        if mask is not None:
            operands.append(mask)
        operands += states
        if place is not None:
            operands.append(place)
        return _run(self.program(call, what, past), (*operands, *call.parameters))

    def program(self, call: Call, what: Mask, past: Optional[Past]) -> Union[str, Program]:
        """The program of a call, or its text for a compiler."""
        if torch.compiler.is_compiling():
            return call.describe(what, past).text()
        key = (call.key, what, past)
        made = self._programs.get(key)
        if made is None:
            made = self._programs[key] = program(call.describe(what, past))
            for oldest in list(self._programs)[:-REMEMBERED]:
                self._programs.pop(oldest, None)
        return made


class Call:
    """One call of a block: its sizes, dtypes and tensors."""

    def __init__(self, block: nn.Module, x: torch.Tensor) -> None:
        parts = parts_of(block)
        self.parts = parts
        self.attn = parts.attn
        self.implementation = check_attention(parts.attn)
        self.x = x
        for wrapper in parts.wrappers:
            if wrapper is not None:
                settle(wrapper)
        self.parameters = parameters_of(parts)
        self.batch, self.sequence, self.hidden = x.shape
        self.heads = parts.attn.num_heads
        self.compute = _compute_dtype(x)
        self.dropout = (_p(parts.attn_dropout), _p(parts.resid_dropout), _p(parts.mlp_dropout))
        if max(self.dropout) >= 1.0:
            raise Unfit("a dropout probability of 1")
        dtype = x.dtype
        for tensor in self.parameters:
            # Shards are put together before a call; other classes of tensors have rules of their own.
            kind = type(tensor)
            if kind is not nn.Parameter and kind is not torch.Tensor:
                raise Unfit(f"parameters of class {kind.__name__}")
            if tensor.dtype is not dtype:
                raise Unfit(f"hidden states of {dtype} with parameters of {tensor.dtype}")
        autocast = self.compute if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type) else None
        self.adapters, tensors = adapters_of(parts, Around(dtype, x.device, autocast))
        self.parameters += tensors
        self.key = (
            x.shape,
            dtype,
            self.compute,
            self.dropout,
            parts.attn.scaling,
            parts.ln_1.eps,
            parts.ln_2.eps,
            type(parts.act),
            self.adapters,
        )

    def check_in_place(self, layer: Any) -> None:
        """A cache is written in place, which cannot be differentiated or interpreted in f64."""
        if self.compute == torch.float64:
            raise Unfit("a cache of torch.float64")
        if self.differentiates(layer):
            raise Unfit("gradients through a cache of fixed size")

    def check_cache(self, shape: Tuple[int, int, int], *held: torch.Tensor) -> None:
        """Refuses a cache whose batch, heads and width, or whose dtype or device, are not those of this call."""
        if shape != (self.batch, self.heads, self.hidden // self.heads):
            raise Unfit("a cache of another batch or size")
        for tensor in held:
            if tensor.dtype != self.compute or tensor.device != self.x.device:
                raise Unfit("a cache of another dtype or on another device")
            if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
                raise Unfit(f"a cache of class {type(tensor).__name__}")

    def draws(self) -> bool:
        """Whether dropout is active."""
        return any(self.dropout) or any(adapter is not None and adapter.dropouts for adapter in self.adapters)

    def differentiates(self, layer: Any = None) -> bool:
        """Whether a gradient may be needed, including that of a cache layer."""
        if not torch.is_grad_enabled():
            return False
        return any(tensor.requires_grad for tensor in (self.x, *self.parameters)) or _requires_grad(layer)

    def describe(self, mask: Mask, past: Optional[Past]) -> Block:
        parts, dtype = self.parts, NAMES[self.x.dtype]
        return Block(
            batch=self.batch,
            sequence=self.sequence,
            hidden=self.hidden,
            inner=parts.c_fc.weight.shape[1],
            heads=self.heads,
            stream=dtype,
            parameters=dtype,
            compute=NAMES[self.compute],
            eps=(parts.ln_1.eps, parts.ln_2.eps),
            scale=float(parts.attn.scaling),
            activation=ACTIVATIONS[type(parts.act)],
            dropout=self.dropout,
            mask=mask,
            past=past,
            adapters=self.adapters,
        )


def _checkpoints(block: Any) -> bool:
    """Whether the forward of a block would checkpoint now. Before version 5.23 transformers did that around the forward."""
    inside = type(block).forward is not forward_of(type(block))
    return inside and bool(block.gradient_checkpointing) and bool(block.training)


def _without_cache(block: Any, kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """Keywords as the checkpointing forward of transformers passes them on: a cache would be filled a second time."""
    changed = dict(kwargs)
    if changed.get("use_cache"):
        changed["use_cache"] = False
    if changed.get("past_key_values") is not None and not getattr(block, "_can_checkpoint_with_cache", False):
        changed["past_key_values"] = None
    if changed != kwargs:
        kind = type(block).__name__
        modeling_layers.logger.warning_once(f"Caching is incompatible with gradient checkpointing in {kind}. It is off.")
    return changed


def _check_call(x: torch.Tensor, encoder: Optional[torch.Tensor], kwargs: Dict[str, Any]) -> None:
    if encoder is not None:
        raise Unfit("cross attention is requested")
    for name, value in kwargs.items():
        if value is None or name in HARMLESS:
            continue
        if name != "output_attentions":
            raise Unfit(f"the keyword {name}")
        if value:
            raise Unfit("attention weights are requested")
    reason = _unfit_tensor(x)
    if reason is not None:
        raise Unfit(reason)
    if x.ndim != 3 or x.numel() == 0:
        raise Unfit(f"hidden states of shape {list(x.shape)}")


def _unfit_tensor(x: torch.Tensor) -> Optional[str]:
    if type(x) not in (torch.Tensor, nn.Parameter):
        return f"hidden states of class {type(x).__name__}"
    if x.dtype not in NAMES:
        return f"hidden states of {x.dtype}"
    if x.device.type != "cpu" and (x.device.type != "cuda" or x.dtype == torch.float64):
        return f"hidden states of {x.dtype} on {x.device.type}"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit is tracing"
    if nn.modules.module._has_any_global_hook():
        return "hooks on all modules"
    return None


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of products: autocast's, where it is on. It leaves f64 alone."""
    kind = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _p(dropout: nn.Dropout) -> float:
    return float(dropout.p) if dropout.training else 0.0


def _layer(cache: Cache, index: int) -> Union[GrowingLayer, StaticLayer]:
    """The layer of a cache, made to grow if it is dynamic."""
    if type(cache) not in (Cache, DynamicCache, StaticCache):
        raise Unfit(f"a cache of class {type(cache).__name__}")
    if cache.offloading:
        raise Unfit("an offloaded cache")
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index]
    if type(layer) is DynamicLayer:
        layer = cache.layers[index] = GrowingLayer.of(layer)
    if type(layer) is not GrowingLayer and type(layer) is not StaticLayer:
        raise Unfit(f"a cache layer of class {type(layer).__name__}")
    kept: Union[GrowingLayer, StaticLayer] = layer
    return kept


def _requires_grad(layer: Any) -> bool:
    """Whether the tensors of a cache layer require a gradient, as in prefix tuning."""
    held = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in held)


def _run(made: Union[str, Program], operands: Tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return run(made, operands) if isinstance(made, str) else made(*operands)
    # Programs have their own casts.
    with torch.autocast(device, enabled=False):
        return run(made, operands) if isinstance(made, str) else made(*operands)
