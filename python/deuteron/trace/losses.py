"""Losses of torch on values: computed in `f32` and rounded once."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Tuple

from deuteron import trace
from deuteron.trace import elementwise, views
from deuteron.trace.emit import as_value
from deuteron.trace.functional import logsigmoid, widened
from deuteron.trace.graph import FLOATS
from deuteron.trace.named import checked
from deuteron.trace.value import Value


def _loss(op: str, losses: Value, reduction: str, word: str) -> Value:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'{op}: expected reduction "none", "mean" or "sum", got {reduction!r}')
    reduced = losses if reduction == "none" else trace.mean(losses) if reduction == "mean" else trace.sum(losses)
    return elementwise.cast(reduced, word)


def _difference(op: str, x: Any, target: Any, weight: Any) -> Tuple[Value, str]:
    (a, word), (b, _) = widened(x, op), widened(target, op)
    if weight is not None:
        raise TypeError(f"{op}: a fused function takes no weight")
    return a - b, word


def mse_loss(
    x: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> Value:
    """`(x - target) ** 2`, reduced as `reduction` says: "mean", "sum" or "none"."""
    difference, word = _difference("mse_loss", x, target, weight)
    return _loss("mse_loss", difference * difference, reduction, word)


def l1_loss(
    x: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> Value:
    """`abs(x - target)`, reduced as `reduction` says: "mean", "sum" or "none"."""
    difference, word = _difference("l1_loss", x, target, weight)
    return _loss("l1_loss", trace.abs(difference), reduction, word)


def huber_loss(x: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None) -> Value:
    """`(x - target) ** 2 / 2` up to a distance of `delta`, linear beyond it, reduced as `reduction` says."""
    difference, word = _difference("huber_loss", x, target, weight)
    size = trace.abs(difference)
    losses = trace.where(size <= delta, difference * difference * 0.5, (size - 0.5 * delta) * delta)
    return _loss("huber_loss", losses, reduction, word)


def smooth_l1_loss(
    x: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", beta: float = 1.0
) -> Value:
    """`(x - target) ** 2 / (2 * beta)` below a distance of `beta`, `abs(x - target) - beta / 2` from there on, reduced as `reduction` says."""
    if beta == 0:
        return l1_loss(x, target, reduction=reduction)
    difference, word = _difference("smooth_l1_loss", x, target, None)
    size = trace.abs(difference)
    losses = trace.where(size < beta, difference * difference * (0.5 / beta), size - 0.5 * beta)
    return _loss("smooth_l1_loss", losses, reduction, word)


def kl_div(
    x: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", log_target: bool = False
) -> Value:
    """`target * (log(target) - x)`, with `x` a logarithm, and the target too if `log_target`; "batchmean" divides the sum by the first size."""
    (a, word), (b, _) = widened(x, "kl_div"), widened(target, "kl_div")
    if log_target:
        losses = trace.exp(b) * (b - a)
    else:
        is_zero = b == 0.0
        losses = trace.where(is_zero, 0.0, b * trace.log(trace.where(is_zero, 1.0, b))) - b * a
    if reduction == "batchmean":
        return elementwise.cast(trace.sum(losses) / float(a.shape[0]), word)
    return _loss("kl_div", losses, reduction, word)


def binary_cross_entropy_with_logits(
    x: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> Value:
    """Cross entropy of `sigmoid(x)` against targets from 0 to 1, without overflow for large `x`."""
    (a, word), (b, _) = widened(x, "binary_cross_entropy_with_logits"), widened(target, "binary_cross_entropy_with_logits")
    log_one = logsigmoid(a)
    log_zero = log_one - a
    kept = b if pos_weight is None else b * elementwise.cast(as_value(pos_weight, "pos_weight"), "f32")
    losses = -(kept * log_one + (1.0 - b) * log_zero)
    losses = losses if weight is None else losses * elementwise.cast(as_value(weight, "weight"), "f32")
    return _loss("binary_cross_entropy_with_logits", losses, reduction, word)


def cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Value:
    """As torch has it, along the second axis, or the only one, and plus `z_loss` times the square of each row's logsumexp, with the same reduction over
    the rows that count."""
    x, target = as_value(x, "cross_entropy"), as_value(target, "cross_entropy")
    if target._word in FLOATS:
        return _likelihood(x, target, weight, ignore_index, reduction, label_smoothing, z_loss)
    plain = weight is None and reduction == "mean" and not label_smoothing and not z_loss and x.ndim == 2
    if plain:
        # The loss is of the dtype of the logits, as in torch.
        return elementwise.cast(trace.cross_entropy(x, target, ignore_index), x._word)
    rows = _classes_last(x, target, "cross_entropy")
    logs = trace.log_softmax(elementwise.cast(rows, "f32"), -1)
    loss = _class_losses("cross_entropy", logs, target, weight, ignore_index, reduction, label_smoothing, "f32")
    if z_loss:
        counted = views.reshape(target, [-1]) != ignore_index
        loss = loss + _penalty(rows, z_loss, counted, reduction, target.shape)
    return elementwise.cast(loss, x._word)


def _likelihood(x: Value, target: Value, weight: Any, ignored: int, reduction: str, smoothing: float, z_loss: float) -> Value:
    """Of probabilities of classes as targets, which have gradients too."""
    if target.shape != x.shape:
        raise ValueError(f"cross_entropy: expected a probability for each class, got {x!r} and {target!r}")
    if ignored >= 0:
        raise ValueError(f"cross_entropy: expected ignore_index only beside classes as targets, got {ignored}")
    shape = x.shape[:1] + x.shape[2:] if x.ndim > 1 else ()
    rows, shares = (elementwise.cast(_last(one), "f32") for one in (x, target))
    logs = trace.log_softmax(rows, -1)
    if weight is not None:
        logs = logs * elementwise.cast(as_value(weight, "cross_entropy"), "f32")
    if smoothing:
        shares = shares * (1.0 - smoothing) + smoothing / rows.shape[-1]
    losses = -trace.sum(shares * logs, -1)
    reduced = views.reshape(losses, shape) if reduction == "none" else losses
    loss = _loss("cross_entropy", reduced, reduction, "f32")
    return elementwise.cast(loss + _penalty(rows, z_loss, None, reduction, shape) if z_loss else loss, x._word)


def _penalty(rows: Value, factor: float, counted: Any, reduction: str, shape: Any) -> Value:
    """`factor * logsumexp^2` of each row that counts."""
    logsumexp = trace.logsumexp(elementwise.cast(rows, "f32"), -1)
    squares = logsumexp * logsumexp * factor
    if counted is not None:
        squares = trace.where(counted, squares, 0.0)
    if reduction == "none":
        return views.reshape(squares, shape)
    total = trace.sum(squares)
    if reduction == "sum":
        return total
    return total / (float(squares.shape[0]) if counted is None else trace.sum(trace.where(counted, 1.0, 0.0)))


def nll_loss(
    x: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Value:
    """`-x` at the target class of each row, for `x` of log-probabilities with classes along the second axis, or the only one."""
    x, target = as_value(x, "nll_loss"), as_value(target, "nll_loss")
    rows = elementwise.cast(_classes_last(x, target, "nll_loss"), "f32")
    return _class_losses("nll_loss", rows, target, weight, ignore_index, reduction, 0.0, x._word)


def _classes_last(x: Value, target: Value, op: str) -> Value:
    """`[rows, classes]` of `[classes]`, `[rows, classes]` or `[batch, classes, ..]`."""
    if not x.shape or x.shape[:1] + x.shape[2:] != target.shape and (x.ndim > 1 or target.shape):
        raise ValueError(f"{op}: expected a target for each row of classes, got {x!r} and {target!r}")
    return _last(x)


def _last(x: Value) -> Value:
    """Rows of classes, which lie along the second axis or the only one."""
    order = [*range(x.ndim)] if x.ndim < 3 else [0, *range(2, x.ndim), 1]
    return views.reshape(views.permute(x, order), [-1, x.shape[min(1, x.ndim - 1)]])


def _class_losses(
    op: str, logs: Value, target: Value, weight: Any, ignored: int, reduction: str, smoothing: float, word: str
) -> Value:
    """Of logarithms of probabilities `[rows, classes]`."""
    rows = views.reshape(target, [-1, 1])
    counted = rows != ignored
    safe = trace.where(counted, rows, 0)
    hit = trace.arange(logs.shape[-1], like=logs) == safe
    weights = None if weight is None else elementwise.cast(as_value(weight, op), "f32")
    # Sums of which all terms but one are 0 pick the class of each row.
    share = trace.where(counted, 1.0, 0.0)
    if weights is not None:
        share = share * trace.sum(trace.where(hit, weights, 0.0), -1, keepdim=True)
    losses = (checked(views.reshape(safe, [-1]), logs.shape[-1]) - trace.sum(trace.where(hit, logs, 0.0), -1, keepdim=True)) * share
    # An ignored row has class 0, whose logarithm may be infinite.
    losses = trace.where(counted, losses, 0.0)
    if smoothing:
        spread = logs if weights is None else logs * weights
        smooth = trace.where(counted, -trace.sum(spread, -1, keepdim=True), 0.0)
        losses = losses * (1.0 - smoothing) + smooth * (smoothing / logs.shape[-1])
    if reduction == "none":
        return elementwise.cast(views.reshape(losses, target.shape), word)
    if reduction not in ("mean", "sum"):
        raise ValueError(f'{op}: expected reduction "none", "mean" or "sum", got {reduction!r}')
    total = trace.sum(losses)
    return elementwise.cast(total / trace.sum(share) if reduction == "mean" else total, word)


TORCH: Mapping[str, Callable[..., Any]] = {
    "cross_entropy": cross_entropy,
    "nll_loss": nll_loss,
    "mse_loss": mse_loss,
    "l1_loss": l1_loss,
    "huber_loss": huber_loss,
    "smooth_l1_loss": smooth_l1_loss,
    "kl_div": kl_div,
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
}
