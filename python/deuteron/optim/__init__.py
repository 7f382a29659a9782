"""Optimisers of PyTorch whose step is one program over all parameters, and clipping of their gradients, which is another one.

`AdamW` and `SGD` subclass the optimisers of `torch.optim` that they replace: the same arguments, parameter groups, hooks and state dict. Moments,
corrections, weight decay and the new weight of every parameter are computed in f32 in one pass over its memory, and written in place.
Parameters of bfloat16 and float16 have states of their dtype, as those of `torch.optim` with `fused=True`; `foreach` and `fused` are accepted
and change nothing.

Works with schedulers, closures, `torch.amp.GradScaler` (gradients are unscaled by the update itself), gradient accumulation, DDP, FSDP, accelerate and the
trainer of transformers. `capturable`, `differentiable`, `amsgrad`, sparse and complex gradients are refused.
`clip_grad_norm_` replaces `torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise ImportError("deuteron.optim needs torch: pip install torch") from error

from ._clip import clip
from ._update import DTYPES, Batch, Let, Rule, Update, Updater

__all__ = ["AdamW", "Lion", "SGD", "clip_grad_norm_"]

# Words of torch's optimisers that no kernel of ours does.
_REFUSED = {
    "amsgrad": "leave it out, or use torch.optim.AdamW",
    "capturable": "capture the forward and backward passes alone, or use the optimiser of torch.optim",
    "differentiable": "use the optimiser of torch.optim",
}

Group = Dict[str, Any]


class _Fused(torch.optim.Optimizer):
    """The step that all share. Subclasses say what to do with one parameter."""

    # Of `torch.amp.GradScaler`: leave it to the step to unscale gradients and to look whether they are finite.
    _step_supports_amp_scaling = True

    def __setstate__(self, state: Dict[str, Any]) -> None:
        for group in state.get("param_groups", ()):
            self._refuse(group)
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    def add_param_group(self, param_group: Group) -> None:
        """Adds parameters with settings of their own, as `torch.optim.Optimizer.add_param_group`.

        >>> import torch, deuteron
        >>> w, b = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
        >>> optimizer = deuteron.optim.AdamW([w])
        >>> optimizer.add_param_group({"params": [b], "weight_decay": 0.0})
        >>> len(optimizer.param_groups)
        2
        """
        self._refuse({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates all parameters that have a gradient; returns the loss of `closure` if one is given.

        >>> import torch, deuteron
        >>> w = torch.ones(2, 3, requires_grad=True)
        >>> optimizer = deuteron.optim.SGD([w], lr=0.5)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> w.tolist()
        [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and float(found) != 0:
            return loss
        with torch.no_grad():
            self._update(1.0 if scale is None else 1.0 / float(scale))
        return loss

    def _update(self, scale: float) -> None:
        """Updates each parameter from its gradient, times `scale`. Nothing is updated if any of them is refused."""
        gradients: Dict[int, Tensor] = {}
        for group in self.param_groups:
            self._refuse(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradients[id(parameter)] = gradient = _gradient(type(self).__name__, parameter)
                    _check(type(self).__name__, _local(parameter), gradient)
        rules: Dict[Rule, Dict[Tuple[int, int], Batch]] = {}
        for group, kind in zip(self.param_groups, self._kinds()):
            signed = -scale if group["maximize"] else scale
            batches = rules.setdefault(self._rule(group), {})
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                step, states = self._states(group, parameter)
                weight = _local(parameter)
                if weight.numel() == 0:
                    continue
                if (kind, step) not in batches:
                    batches[kind, step] = Batch(self._numbers(group, step, signed), [])
                update = Update(weight, gradients[id(parameter)], tuple([_local(state) for state in states]))
                batches[kind, step].updates.append(update)
        updaters: Dict[Rule, Updater] = self.__dict__.setdefault("_updaters", {})
        for rule, batches in rules.items():
            if rule not in updaters:
                updaters[rule] = Updater(rule)
            updaters[rule].run(list(batches.values()))

    def _kinds(self) -> List[int]:
        """A number for each group; groups of equal numbers share those of their rule. Groups whose settings once differed never do again, so that
        a schedule that makes them equal for a while compiles nothing."""
        before: List[int] = self.__dict__.get("_kinds_before", [])
        numbers: Dict[Tuple[Any, ...], int] = {}
        kinds = []
        for at, group in enumerate(self.param_groups):
            settings = tuple([_plain(group.get(name)) for name in (*self.defaults, "initial_lr")])
            kinds.append(numbers.setdefault((before[at] if at < len(before) else -1, *settings), len(numbers)))
        self.__dict__["_kinds_before"] = kinds
        return kinds

    def _refuse(self, group: Group) -> None:
        for word, advice in _REFUSED.items():
            if group.get(word):
                raise ValueError(f"{type(self).__name__}: expected {word}=False, got {group[word]!r}; {advice}")

    def _rule(self, group: Group) -> Rule:
        """The arithmetic of a group."""
        raise NotImplementedError

    def _numbers(self, group: Group, step: int, scale: float) -> Tuple[float, ...]:
        """The numbers of the rule in a step."""
        raise NotImplementedError

    def _states(self, group: Group, parameter: Tensor) -> Tuple[int, Tuple[Tensor, ...]]:
        """Which step this is of a parameter, and its states."""
        raise NotImplementedError


def _plain(setting: Any) -> Any:
    """A setting as it can be compared: numbers in place of tensors of one element."""
    if isinstance(setting, (list, tuple)):
        return tuple([_plain(one) for one in setting])
    return float(setting) if isinstance(setting, Tensor) else setting


def _local(tensor: Tensor) -> Tensor:
    """What of a tensor is in this process: all, or the shard of a DTensor."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def _gradient(name: str, parameter: Tensor) -> Tensor:
    """What of a gradient is in this process. That of a DTensor is laid out as its parameter first: summed if each process has a part of the sum."""
    gradient: Any = parameter.grad
    placed: Any = parameter
    placements = getattr(placed, "placements", None)
    if placements is not None:
        if not hasattr(gradient, "placements"):
            raise TypeError(f"{name}: expected a DTensor as the gradient of a DTensor, got a {type(gradient).__name__}")
        if gradient.placements != placements:
            gradient = gradient.redistribute(placed.device_mesh, placements)
    local: Any = _local(gradient)
    # A collective that has not ended has a tensor without memory.
    ended: Tensor = local.wait() if hasattr(local, "wait") else local
    return ended


def _check(name: str, weight: Tensor, gradient: Tensor) -> None:
    """Refuses what no kernel updates."""
    if gradient.layout != torch.strided or weight.layout != torch.strided:
        raise RuntimeError(
            f"{name}: expected dense parameters and gradients, got a gradient of layout {gradient.layout} for a parameter of "
            f"layout {weight.layout}; use torch.optim.SparseAdam for these, or embeddings with sparse=False"
        )
    for word, tensor in (("parameters", weight), ("gradients", gradient)):
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name}: expected {word} of float32, bfloat16 or float16, got {tensor.dtype}; use the optimiser of torch.optim for these"
            )
    if weight.shape != gradient.shape:
        raise ValueError(
            f"{name}: expected a gradient of the shape of its parameter, {list(weight.shape)}, got {list(gradient.shape)}"
        )


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _adamw(let: Let) -> List[str]:
    g = let("g", "mul gradient scale")
    m = let("m", "add", let("m_kept", "mul first keep1"), let("m_added", "mul take1", g))
    square = let("square", "mul", g, g)
    v = let("v", "add", let("v_kept", "mul second keep2"), let("v_added", "mul take2", square))
    divisor = let("divisor", "add eps", let("unbiased", "mul unbias", let("root", "sqrt", v)))
    change = let("change", "mul rate", let("ratio", "div", m, divisor))
    return [let("w", "sub", let("kept", "mul weight shrink"), change), m, v]


_ADAMW = Rule(
    "adamw",
    ("first", "second"),
    ("scale", "keep1", "take1", "keep2", "take2", "unbias", "eps", "shrink", "rate"),
    _adamw,
)


class AdamW(_Fused, torch.optim.AdamW):
    """AdamW of Loshchilov and Hutter, in place of `torch.optim.AdamW`. State dict: `step`, `exp_avg`, `exp_avg_sq`, in both directions.

    With `g` the gradient of step `t`: `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g g`,
    `w = (1 - lr weight_decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)`.

    - `params`: parameters or groups of them, of any shape; float32, bfloat16 or float16; on a CPU or a GPU. `exp_avg` and
      `exp_avg_sq` have the shape and dtype of their parameter, `step` is a number of float32 on the CPU.
    - `lr` may be a tensor of one element, as may `betas`; it is read in every step.
    - `maximize` follows the gradient upwards. `foreach` and `fused` change nothing. `amsgrad`, `capturable` and `differentiable` are
      refused.

    >>> import torch, deuteron
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = deuteron.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    >>> model(torch.ones(3, 4)).square().mean().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["exp_avg"].shape
    torch.Size([2, 4])
    >>> plain = torch.optim.AdamW(model.parameters())
    >>> plain.load_state_dict(optimizer.state_dict())
    """

    def _rule(self, group: Group) -> Rule:
        return _ADAMW

    def _numbers(self, group: Group, step: int, scale: float) -> Tuple[float, ...]:
        beta1, beta2 = [float(beta) for beta in group["betas"]]
        rate = float(group["lr"])
        unbias = 1.0 / math.sqrt(1.0 - beta2**step)
        shrink = 1.0 - rate * float(group["weight_decay"])
        taken = (beta1, 1.0 - beta1, beta2, 1.0 - beta2)
        return (scale, *taken, unbias, float(group["eps"]), shrink, rate / (1.0 - beta1**step))

    def _states(self, group: Group, parameter: Tensor) -> Tuple[int, Tuple[Tensor, ...]]:
        state = self.state[parameter]
        if len(state) == 0:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = _zeros(parameter), _zeros(parameter)
        return _next_step(state), (state["exp_avg"], state["exp_avg_sq"])


def _next_step(state: Dict[str, Any]) -> int:
    """Counts a step. Torch's fused optimisers keep the count on the device of the parameter; here the host needs it."""
    if state["step"].device.type != "cpu":
        state["step"] = state["step"].cpu()
    state["step"] += 1
    return int(state["step"])


@lru_cache(maxsize=None)
def _sgd(with_momentum: bool, nesterov: bool, decays: bool) -> Rule:
    def body(let: Let) -> List[str]:
        g = let("scaled", "mul gradient scale")
        if decays:
            g = let("g", "add", g, let("decayed", "mul weight decay"))
        if not with_momentum:
            return [let("w", "sub weight", let("change", "mul rate", g))]
        moment = let("m", "add", let("kept", "mul moment keep"), let("added", "mul take", g))
        ahead = let("ahead", "add", g, let("further", "mul momentum", moment)) if nesterov else moment
        return [let("w", "sub weight", let("change", "mul rate", ahead)), moment]

    words = ("scale", *(("decay",) if decays else ()), "rate")
    numbers = (*words, *(("keep", "take") if with_momentum else ()), *(("momentum",) if nesterov else ()))
    return Rule("sgd", ("moment",) if with_momentum else (), numbers, body)


class SGD(_Fused, torch.optim.SGD):
    """Stochastic gradient descent, in place of `torch.optim.SGD`. State dict: `momentum_buffer`, in both directions.

    With `g` the gradient plus `weight_decay w`: `m = momentum m + (1 - dampening) g`, at the first step `m = g`; `w = w - lr m`, with
    `nesterov` `w = w - lr (g + momentum m)`. Without momentum there is no state, and `w = w - lr g`.

    - `params`: parameters or groups of them, of any shape; float32, bfloat16 or float16; on a CPU or a GPU. `momentum_buffer` has the
      shape and dtype of its parameter.
    - `lr` may be a tensor of one element. `foreach` and `fused` change nothing. `differentiable` is refused.

    >>> import torch, deuteron
    >>> w = torch.ones(2, 3, requires_grad=True)
    >>> optimizer = deuteron.optim.SGD([w], lr=0.1, momentum=0.9, nesterov=True)
    >>> w.square().sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[w]["momentum_buffer"].shape
    torch.Size([2, 3])
    """

    def _rule(self, group: Group) -> Rule:
        return _sgd(group["momentum"] != 0, bool(group["nesterov"]), group["weight_decay"] != 0)

    def _numbers(self, group: Group, step: int, scale: float) -> Tuple[float, ...]:
        momentum = float(group["momentum"])
        decay = float(group["weight_decay"])
        numbers = (scale, *((decay,) if decay != 0 else ()), float(group["lr"]))
        if momentum == 0:
            return numbers
        kept = (0.0, 1.0) if step == 1 else (momentum, 1.0 - float(group["dampening"]))
        return (*numbers, *kept, *((momentum,) if group["nesterov"] else ()))

    def _states(self, group: Group, parameter: Tensor) -> Tuple[int, Tuple[Tensor, ...]]:
        if group["momentum"] == 0:
            return 2, ()
        state = self.state[parameter]
        is_first = state.get("momentum_buffer") is None
        if is_first:
            state["momentum_buffer"] = _zeros(parameter)
        return 1 if is_first else 2, (state["momentum_buffer"],)


def _lion(let: Let) -> List[str]:
    g = let("g", "mul gradient scale")
    direction = let("direction", "add", let("d_kept", "mul moment keep1"), let("d_added", "mul take1", g))
    is_above, is_below = let("is_above", "gt", direction, "0.0"), let("is_below", "lt", direction, "0.0")
    # Neither above nor below 0 it is 0, or NaN.
    below = let("below", "select", is_below, "-1.0", let("neither", "mul", direction, "0.0"))
    sign = let("sign", "select", is_above, "1.0", below)
    m = let("m", "add", let("m_kept", "mul moment keep2"), let("m_added", "mul take2", g))
    return [let("w", "sub", let("kept", "mul weight shrink"), let("change", "mul rate", sign)), m]


_LION = Rule("lion", ("moment",), ("scale", "keep1", "take1", "keep2", "take2", "shrink", "rate"), _lion)


class Lion(_Fused):
    """Lion of Chen and others, which `torch.optim` does not have. State dict: `exp_avg`.

    With `g` the gradient: `w = (1 - lr weight_decay) w - lr sign(b1 m + (1 - b1) g)`, then `m = b2 m + (1 - b2) g`.

    - `params`: parameters or groups of them, of any shape; float32, bfloat16 or float16; on a CPU or a GPU. `exp_avg` has the shape
      and dtype of its parameter.
    - `lr` may be a tensor of one element; usual are a tenth to a third of AdamW's, with three to ten times its `weight_decay`.
      `maximize` follows the gradient upwards.

    >>> import torch, deuteron
    >>> w = torch.zeros(2, requires_grad=True)
    >>> optimizer = deuteron.optim.Lion([w], lr=0.25)
    >>> (w * torch.tensor([3.0, -5.0])).sum().backward()
    >>> optimizer.step()
    >>> w.tolist()
    [-0.25, 0.25]
    """

    def __init__(
        self,
        params: Any,
        lr: Union[float, Tensor] = 1e-4,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not float(lr) >= 0.0:
            raise ValueError(f"Lion: expected a learning rate of at least 0, got {lr}")
        if not all([0.0 <= beta < 1.0 for beta in betas]) or len(betas) != 2:
            raise ValueError(f"Lion: expected two betas of at least 0 and less than 1, got {betas}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Lion: expected a weight decay of at least 0, got {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def _rule(self, group: Group) -> Rule:
        return _LION

    def _numbers(self, group: Group, step: int, scale: float) -> Tuple[float, ...]:
        beta1, beta2 = [float(beta) for beta in group["betas"]]
        rate = float(group["lr"])
        return (scale, beta1, 1.0 - beta1, beta2, 1.0 - beta2, 1.0 - rate * float(group["weight_decay"]), rate)

    def _states(self, group: Group, parameter: Tensor) -> Tuple[int, Tuple[Tensor, ...]]:
        state = self.state[parameter]
        if len(state) == 0:
            state["exp_avg"] = _zeros(parameter)
        return 1, (state["exp_avg"],)


def clip_grad_norm_(
    parameters: Union[Tensor, Iterable[Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: Optional[bool] = None,
) -> Tensor:
    """Scales the gradients of all parameters in place so that their norm is at most `max_norm`, in place of
    `torch.nn.utils.clip_grad_norm_`. Gives the norm before that, that of all elements as one vector.

    Each gradient is multiplied by `min(1, max_norm / (norm + 1e-6))`.

    - `parameters`: a parameter or several; those without a gradient are left alone. Gradients are float32, bfloat16 or float16 in any mixture, on
      a CPU or a GPU. The norm has the dtype that torch promotes theirs to; without a gradient it is 0.
    - `norm_type`: the order of the norm, above 0; `inf` is the largest magnitude.
    - `error_if_nonfinite`: a norm that is infinite or NaN is a `RuntimeError`, and no gradient is changed. Otherwise gradients become 0 or NaN
      then, as in torch.
    - `foreach` changes nothing.

    >>> import torch, deuteron
    >>> w = torch.zeros(2, requires_grad=True)
    >>> (w * torch.tensor([3.0, 4.0])).sum().backward()
    >>> deuteron.optim.clip_grad_norm_([w], max_norm=1.0)
    tensor(5.)
    >>> w.grad
    tensor([0.6000, 0.8000])
    """
    return clip(parameters, max_norm, norm_type, bool(error_if_nonfinite))
