"""Programs as operators of PyTorch.

Outside of a compiler, a call goes straight to the engine, by a `torch.autograd.Function` where a gradient is wanted. Where torch
looks at the call instead of doing it (`torch.compile`, fake tensors, modes), it goes by two operators of the library
`deuteron`: `forward` and `backward`, whose first argument is the text of the program.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any, List, Optional, Sequence

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from . import _call
from ._call import program as find
from ._native import Program, SeedBatches

# Programs that multiply matrices: under autocast all their floats are of its dtype, as those of torch's are.
_PRODUCTS = frozenset(
    "linear_act norm_linear qkv ffn attention attention_scores attention_add_norm attention_block linear_cross_entropy".split()
)

# Norms take weights of another dtype than their rows.
_MIXING = frozenset(("layer_norm", "rms_norm", "norm_act"))

_NAMES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.int64: "i32",
    torch.int8: "i8",
    torch.bool: "bool",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items() if dtype != torch.int64}

_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_autocast = torch._C._is_any_autocast_enabled


def call(program: Program, operands: Sequence[Any]) -> Sequence[Any]:
    """Runs a program on tensors and returns its outputs; under torch function modes too."""
    wants, others = False, False
    for operand in operands:
        kind = type(operand)
        if kind is _TENSOR or kind is _PARAMETER:
            wants = wants or operand.requires_grad
        elif isinstance(operand, _TENSOR):
            return compiled(program.text, operands)
        else:
            others = True
    if forward_ad._current_level >= 0:
        _refuse_tangents(program.name, operands)
    # A mode or a transform of functorch takes calls of operators.
    if _modes() or _transforms() is not None:
        _refuse_transforms(program.name)
        return compiled(program.text, operands)
    if _autocast():
        operands = _cast(program.name, operands)
    if wants and torch.is_grad_enabled():
        if others:
            _check_tensors(program.name, operands)
        return differentiate(program, operands)
    return program.forward(operands)


def differentiate(program: Program, operands: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Runs a program on plain tensors so that a gradient can be taken."""
    if not program.differentiable:
        raise _no_gradient(program.name)
    return _apply(program, *operands)  # type: ignore[no-any-return]


def _refuse_tangents(name: str, operands: Sequence[Any]) -> None:
    """Refuses derivatives of forward mode, which would be lost."""
    for operand in operands:
        if isinstance(operand, torch.Tensor) and forward_ad.unpack_dual(operand).tangent is not None:
            raise NotImplementedError(f"{name}: forward-mode derivatives are not supported; use backward()")


def _refuse_transforms(name: str) -> None:
    """Refuses derivatives of functorch, which would be lost."""
    transform = _transforms()
    kinds = torch._C._functorch.TransformType
    if transform is not None and transform.key() in (kinds.Grad, kinds.Jvp):
        raise NotImplementedError(f"{name}: derivatives by torch.func are not supported; use torch.autograd.grad")


def draw(like: torch.Tensor) -> torch.Tensor:
    """A seed, drawn on the device of a tensor: `torch.manual_seed` rules it, and a CUDA graph draws anew at each replay."""
    if torch.compiler.is_compiling():
        return torch.randint(0, _SEEDS, (), dtype=torch.int32, device=like.device)
    seed = _seed_batches.next_seed(like) if _HAS_OFFSETS else None
    # The same number as `randint` gives, faster; no compiler knows it.
    return like.new_empty((), dtype=torch.int32).random_(0, _SEEDS) if seed is None else seed


_call.draw = draw

# Seeds are below.
_SEEDS = 2**31 - 1

# Whether generators have offsets.
_HAS_OFFSETS = hasattr(torch.Generator, "get_offset") and hasattr(torch.Generator, "set_offset")


def _drawn(device: int, seed: int, offset: int, count: int) -> Sequence[torch.Tensor]:
    """Seeds on a GPU."""
    # What modes look at is the call, not how it comes by its seed. Seeds are saved for gradients, whoever draws them first.
    with _disable_current_modes() if _modes() else nullcontext(), torch.inference_mode(False):
        drawer = torch.Generator(device=f"cuda:{device}")
        # Numbers of its own: torch's are those of the same seed.
        drawer.manual_seed(seed ^ 0x6465757465726F6E)
        drawer.set_offset(offset)
        # One in each four: kernels read in place what lies where a vector may.
        drawn = torch.empty((count, 4), dtype=torch.int32, device=drawer.device)
        return drawn.random_(0, _SEEDS, generator=drawer)[:, 0].unbind()


_seed_batches = SeedBatches(_drawn)


def _check_tensors(name: str, operands: Sequence[Any]) -> None:
    for operand in operands:
        if not isinstance(operand, torch.Tensor):
            raise TypeError(f"{name}: expected tensors of PyTorch beside one, got {type(operand).__name__}")


def _no_gradient(name: str) -> TypeError:
    return TypeError(
        f"{name}: it has no gradient, and an operand requires one; call it under torch.no_grad() or detach its operands"
    )


def _no_second(name: str) -> RuntimeError:
    return RuntimeError(f"{name}: second derivatives are not supported")


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Program, *operands: Any) -> Any:
        outputs, kept = program.forward_saving(operands)
        ctx.program = program
        ctx.operands = len(operands)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *kept)
        for output in outputs:
            if not output.is_floating_point():
                ctx.mark_non_differentiable(*[one for one in outputs if not one.is_floating_point()])
                break
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * (1 + ctx.operands)
        tensors = ctx.saved_tensors
        operands, saved = tensors[: ctx.operands], tensors[ctx.operands :]
        dense = [_dense(gradient) for gradient in gradients]
        found = ctx.program.backward(operands, saved, dense, ctx.needs_input_grad[1:])
        if torch.is_grad_enabled():
            # The gradient itself may be differentiated: without this, it would be a constant to whoever tries.
            found = _Once.apply(ctx.program.name, len(found), *found, *operands, *gradients)
        return (None, *found)


class _Once(torch.autograd.Function):
    """First gradients, which cannot be differentiated again although they depend on the operands and on incoming gradients."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Any) -> Any:
        ctx.name = name
        return tuple(None if one is None else one.detach() for one in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise _no_second(ctx.name)


# That of the base class looks for transforms of functorch, which were looked for before.
_apply = super(torch.autograd.Function, _Function).apply


def _dense(gradient: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """A gradient whose elements are there, each once: that of a sum is one number, repeated."""
    return None if gradient is None else gradient.contiguous()


def _cast(name: str, operands: Sequence[Any]) -> Sequence[Any]:
    """Operands as autocast would have them: of its dtype for products, else of the widest dtype among them."""
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    kind = tensors[0].device.type
    floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if not torch.is_autocast_enabled(kind) or torch.float64 in floats:
        return operands
    if name in _PRODUCTS:
        target = torch.get_autocast_dtype(kind)
    elif len(floats) > 1 and name not in _MIXING:
        target = torch.float32
    else:
        return operands

    def one(operand: Any) -> Any:
        if isinstance(operand, torch.Tensor) and operand.is_floating_point() and operand.dtype != target:
            return operand.to(target)
        return operand

    return [one(operand) for operand in operands]


@torch.compiler.assume_constant_result
def rms_epsilon(dtype: torch.dtype) -> float:
    """What `torch.nn.functional.rms_norm` adds where it is given none: the epsilon of the dtype, or that of the dtype that it computes in. Versions of
    torch differ, so the one that is installed is asked."""
    return _found_epsilon(dtype)


@lru_cache(maxsize=None)
def _found_epsilon(dtype: torch.dtype) -> float:
    own, inner = (float(torch.finfo(one).eps) for one in (dtype, torch.float32 if dtype.itemsize < 4 else dtype))
    if own == inner:
        return own
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        # The square of each element is the geometric mean of both: the result is nearly 1 beside the smaller, and nearly 0 beside the larger.
        x = torch.full((1,), (own * inner) ** 0.25, dtype=dtype, device="cpu")
        return own if float(torch.nn.functional.rms_norm(x, (1,))) < 0.5 else inner


# Operators for compilers.

_library = torch.library.Library("deuteron", "DEF")
_library.define("forward(str program, Tensor[] operands, bool saving) -> Tensor[]")
_library.define(
    "backward(str program, Tensor[] operands, Tensor[] saved, Tensor?[] gradients, bool[] wanted) -> Tensor[]"
)


@torch.compiler.assume_constant_result
def _about(text: str) -> tuple[str, int, int, bool]:
    """Name, operands, outputs and whether it has a gradient."""
    program = find(text)
    return program.name, len(program.operands), len(program.outputs), program.differentiable


def compiled(text: str, operands: Sequence[Any]) -> list[Any]:
    """Runs the program of a text by the operators."""
    name, expected, outputs, differentiable = _about(text)
    if len(operands) > expected:
        given = [operand for operand in operands if operand is not None]
        operands = given if len(given) == expected else operands
    _check_tensors(name, operands)
    if torch.is_autocast_enabled(operands[0].device.type):
        operands = _cast(name, operands)
    saving = torch.is_grad_enabled() and any([operand.requires_grad for operand in operands])
    if saving and not differentiable:
        raise _no_gradient(name)
    results = torch.ops.deuteron.forward(text, list(operands), saving)
    return list(results[:outputs])


def _forward(program: str, operands: List[torch.Tensor], saving: bool) -> List[torch.Tensor]:
    known = find(program)
    results: List[torch.Tensor] = known.forward_whole(operands) if saving else known.forward(operands)
    return _apart(results)


def _apart(tensors: List[torch.Tensor]) -> List[torch.Tensor]:
    """Results of an operator, each with memory of its own: one tensor may be the gradient of both operands of a sum."""
    apart: List[torch.Tensor] = []
    for one in tensors:
        apart.append(one.clone() if any(one is other for other in apart) else one)
    return apart


def _backward(
    program: str,
    operands: List[torch.Tensor],
    saved: List[torch.Tensor],
    gradients: List[Optional[torch.Tensor]],
    wanted: List[bool],
) -> List[torch.Tensor]:
    found = find(program).backward(operands, saved, [_dense(gradient) for gradient in gradients], wanted)
    zipped = zip(found, operands, wanted)
    # The gradient of a transposed weight lies as the weight does; compilers were told of a contiguous one.
    dense = [
        torch.zeros_like(operand, memory_format=torch.contiguous_format) if one is None else one.contiguous()
        for one, operand, is_wanted in zipped
        if is_wanted
    ]
    return _apart(dense)


def _types(tensors: Sequence[torch.Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    return [(_NAMES[tensor.dtype], tuple(int(size) for size in tensor.shape)) for tensor in tensors]


def _fake_forward(program: str, operands: List[torch.Tensor], saving: bool) -> List[torch.Tensor]:
    types, _ = find(program).types(_types(operands), saving)
    return [operands[0].new_empty(shape, dtype=_DTYPES[dtype]) for dtype, shape in types]


def _fake_backward(
    program: str,
    operands: List[torch.Tensor],
    saved: List[torch.Tensor],
    gradients: List[Optional[torch.Tensor]],
    wanted: List[bool],
) -> List[torch.Tensor]:
    return [
        torch.empty_like(operand, memory_format=torch.contiguous_format)
        for operand, is_wanted in zip(operands, wanted)
        if is_wanted
    ]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    program, operands, saving = inputs
    known = find(program)
    kept = known.types(_types(operands), True)[1] if saving else []
    ctx.program = program
    ctx.operands = len(operands)
    ctx.outputs = len(known.outputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *[output[index] for index in kept])


def _gradient(ctx: Any, gradients: Any) -> Any:
    tensors = ctx.saved_tensors
    operands, saved = list(tensors[: ctx.operands]), list(tensors[ctx.operands :])
    gradients = list(gradients[: ctx.outputs])
    wanted = [bool(one) and operand.is_floating_point() for one, operand in zip(ctx.needs_input_grad[1], operands)]
    if all(gradient is None for gradient in gradients):
        return None, [None] * ctx.operands, None
    found = iter(torch.ops.deuteron.backward(ctx.program, operands, saved, gradients, wanted))
    return None, [next(found) if is_wanted else None for is_wanted in wanted], None


def _refuse_second(ctx: Any, gradients: Any) -> Any:
    raise _no_second(ctx.name)


def _keep_name(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.name = find(inputs[0]).name


def _no_batching(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise NotImplementedError(
        "deuteron: vmap is not supported; the ops take any leading axes, so call them with the batch as one of those"
    )


for _name, _implementation, _fake in (
    ("forward", _forward, _fake_forward),
    ("backward", _backward, _fake_backward),
):
    _library.impl(_name, _implementation, "CPU")
    _library.impl(_name, _implementation, "CUDA")
    torch.library.register_fake(f"deuteron::{_name}", _fake, lib=_library)
    torch.library.register_vmap(f"deuteron::{_name}", _no_batching, lib=_library)
torch.library.register_autograd("deuteron::forward", _gradient, setup_context=_setup, lib=_library)
torch.library.register_autograd("deuteron::backward", _refuse_second, setup_context=_keep_name, lib=_library)
