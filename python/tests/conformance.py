"""PyTorch's own samples (OpInfo) through `deuteron.fuse` and the catalogue: each is right or refused, never silently different.

    python python/tests/conformance.py [--device cpu|cuda] [--ops NAME ...] [--dtypes f32 f16 bf16 i64 bool] [--reference] [--most N]
                                       [--part I/N] [--out FILE]

Every function of torch that has an OpInfo is asked for, whether `fuse` claims it or not. A sample is *right* if results and gradients
are within the bound below, *refused* if a typed error says what was expected, *failed* if compiling or running it failed (a
`RuntimeError`, a `MemoryError`, or an error that no refusal raises), *different* otherwise. Samples that torch refuses must be refused, and a
GPU refuses what the CPU refuses: a sample that only the GPU refuses has failed. Methods, operators and in-place variants are asked for
with `f32`. Functions of the catalogue whose options no sample of torch has are also asked for with samples of ours. `--reference` adds
torch's reference samples, which have broadcasts, strides and extreme values, and takes several times as long. Exit code 0: nothing is
different and nothing failed; 1: something did. On a GPU the default are floats, since whole numbers beyond 32 bits are documented to differ
there; `--part 2/16` asks for every sixteenth function from the second on.

The bound of an element is computed. The function in f64 is the exact value; its condition is measured by moving every operand by a
relative 2^-24 up or down at random, eight times. An element may be off by two roundings of its own dtype, by 32 f32 roundings and
two of its own dtype carried through the condition, and by four times what torch itself is off; an element of a gradient also by as many
roundings of the largest of all, and four times what torch's worst is off. What equals torch's bits is right.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import itertools
import subprocess
import sys
import time
import types
import unittest
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import deuteron
from deuteron import _torch

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "bool": torch.bool,
}
STEP = 2.0**-24
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}
DRAWS = 8
VERDICTS = ("right", "refused", "different", "failed")
REFUSALS = (TypeError, ValueError, IndexError, OverflowError, NotImplementedError)
"""what a refusal raises; anything else is a failure"""
UNKNOWN = 3
"""samples after which a function that `fuse` does not know is asked no more"""
CANCELS = ("nn.functional.gelu", "nn.functional.tanhshrink")
"""functions whose formula cancels, in torch too: each element may be off by as much as torch's worst"""

Function = Callable[..., Any]


class Outcome(NamedTuple):
    """What became of one sample."""

    verdict: str
    """one of `VERDICTS`"""
    why: str = ""
    worst: float = 0.0
    """the largest error as a part of its bound"""


def operators() -> Sequence[Any]:
    """All OpInfos of torch."""
    # torch's tests import this package for a class that samples do not need.
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


class Sample:
    """A call of a function: its tensors, and all else as constants around them."""

    def __init__(self, function: Function, arguments: Any, keywords: Any) -> None:
        self.function = function
        leaves, self._form = tree_flatten((arguments, keywords))
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[place].detach() for place in self._places]
        self._leaves = leaves

    def __call__(self, *tensors: Any, exact: bool = False) -> Any:
        """The function of these tensors in place of its own; exactly, with f64 for every float dtype that it names."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors):
            leaves[place] = tensor
        if exact:
            leaves = [torch.float64 if leaf in UNIT else leaf for leaf in leaves]
        arguments, keywords = tree_unflatten(leaves, self._form)
        return self.function(*arguments, **keywords)

    def __repr__(self) -> str:
        shown = [f"{str(one.dtype).split('.')[-1]}{list(one.shape)}" for one in self.tensors]
        others = [leaf for place, leaf in enumerate(self._leaves) if place not in self._places]
        return f"{' '.join(shown)} {others}"


class Ran(NamedTuple):
    """Results of a call, and the gradients of its float operands."""

    results: List[Any]
    gradients: List[Any]


def is_float(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating_point)


def run(function: Function, tensors: Sequence[Any], weights: Optional[Sequence[Any]], gradients: bool) -> Ran:
    """Calls a function; `weights` are the gradients of its float results, drawn if they are not given."""
    leaves = [one.clone().requires_grad_(gradients and is_float(one)) for one in tensors]
    returned = function(*leaves)
    results = tensors_of(returned)
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    wanted = [one for one in results if one.requires_grad]
    found: Sequence[Any] = []
    forms = all(one.shape == weight.shape for one, weight in zip(results, weights or ()) if is_float(one))
    if asked and wanted and forms:
        given = [weight for one, weight in zip(results, weights or ()) if one.requires_grad]
        found = torch.autograd.grad(wanted, asked, given, allow_unused=True)
        found = [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(asked, found)]
    return Ran([one.detach() for one in results], list(found))


def tensors_of(returned: Any) -> List[Any]:
    leaves, _ = tree_flatten(returned)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise NotImplementedError("the function returns other things than tensors")
    return list(leaves)


def judge(sample: Sample, candidate: Function, gradients: bool, generator: Any, cancels: bool = False) -> Outcome:
    """Compares what a candidate computes for a sample with torch."""
    try:
        results = tensors_of(sample(*(one.clone() for one in sample.tensors)))
    except NotImplementedError:
        raise
    except Exception as error:  # torch refuses what its own samples hold, so must we
        refused = f"torch refuses it: {error}"
        try:
            candidate(*(one.clone() for one in sample.tensors))
        except (*REFUSALS, type(error)):
            return Outcome("refused", refused)
        except Exception as failure:
            return Outcome("failed", f"{type(failure).__name__}: {failure}")
        return Outcome("different", refused)
    gradients = gradients and any(is_float(one) for one in results) and any(is_float(one) for one in sample.tensors)
    weights = [_drawn(one, generator) for one in results]
    try:
        theirs = run(sample, sample.tensors, weights, gradients)
    except RuntimeError:
        # torch has no gradient for it.
        gradients = False
        theirs = run(sample, sample.tensors, weights, False)
    try:
        mine = run(candidate, sample.tensors, weights, gradients)
    except REFUSALS as error:
        said = f"{type(error).__name__}: {error}"
        return Outcome("failed", f"only a GPU refuses it: {said}") if _cpu_takes(sample, candidate) else Outcome("refused", said)
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}")
    return _compared(sample, weights, mine, theirs, gradients, generator, cancels)


def _cpu_takes(sample: Sample, candidate: Function) -> bool:
    """Whether the CPU computes what a GPU refused."""
    if all(one.device.type == "cpu" for one in sample.tensors):
        return False
    try:
        candidate(*(one.cpu() for one in sample.tensors))
    except Exception:
        return False
    return True


def _compared(
    sample: Sample, weights: Any, mine: Ran, theirs: Ran, gradients: bool, generator: Any, cancels: bool
) -> Outcome:
    form = _form_of(mine), _form_of(theirs)
    if form[0] != form[1]:
        return Outcome("different", f"form {form[0]}, torch {form[1]}")

    def exact(moved: bool) -> Ran:
        operands = [_widened(one, generator if moved else None) for one in sample.tensors]
        cotangents = [_widened(one, generator if moved else None) for one in weights]
        return run(lambda *tensors: sample(*tensors, exact=True), operands, cotangents, gradients)

    try:
        center = exact(False)
        around = [exact(True) for _ in range(DRAWS)]
    except (RuntimeError, TypeError, ValueError) as error:
        return Outcome("different" if not _equal(mine, theirs) else "right", f"torch has no f64 for it: {error}")
    worst, largest = 0.0, max([float(_largest(one)) for one in center.gradients], default=0.0)
    for part in ("results", "gradients"):
        moved = zip(*(getattr(one, part) for one in around))
        rows = zip(getattr(mine, part), getattr(theirs, part), getattr(center, part), moved)
        for index, (ours, native, value, others) in enumerate(rows):
            ratio = _ratio(ours, native, value, others, largest if part == "gradients" else None, cancels)
            worst = max(worst, ratio)
            if ratio > 1.0:
                return Outcome("different", f"{part}[{index}] at {ratio:.3g} of the bound", ratio)
    return Outcome("right", "", worst)


def _form_of(ran: Ran) -> List[Tuple[Any, Tuple[int, ...]]]:
    return [(one.dtype, tuple(one.shape)) for one in (*ran.results, *ran.gradients)]


def _equal(a: Ran, b: Ran) -> bool:
    return all(bool(_same(x, y).all()) for x, y in zip((*a.results, *a.gradients), (*b.results, *b.gradients)))


def _same(a: Any, b: Any) -> Any:
    return (a == b) | ((a != a) & (b != b))


def _ratio(ours: Any, native: Any, value: Any, moved: Sequence[Any], largest: Optional[float], cancels: bool) -> float:
    """The largest error as a part of its bound; infinite where there is none. `largest` is of all gradients, if this is one."""
    same = _same(ours, native)
    if ours.dtype not in UNIT or not is_float(value):
        return 0.0 if bool(same.all()) else float("inf")
    unit, wide = UNIT[ours.dtype], value.double()
    condition = torch.stack([(one.double() - wide).abs() for one in moved]).amax(0)
    bound = 2 * unit * wide.abs() + condition * (32 + 2 * unit / STEP) + 4 * (native.double() - wide).abs()
    bound = bound + SMALLEST[ours.dtype]
    if largest is not None:
        bound = bound + (32 * STEP + unit) * largest
    if largest is not None or cancels:
        bound = bound + 4 * _largest(native.double() - wide)
    ratio = (ours.double() - wide).abs() / bound
    ratio = torch.where(ratio.isnan(), torch.inf, ratio)
    ratio = torch.where(same | _same(ours, value.to(ours.dtype)), 0.0, ratio)
    return float(ratio.max()) if ratio.numel() else 0.0


def _largest(values: Any) -> Any:
    """The largest size that is finite."""
    sizes = values.abs()
    return torch.where(sizes.isfinite(), sizes, 0.0).amax() if sizes.numel() else 0.0


def _drawn(result: Any, generator: Any) -> Any:
    if not is_float(result):
        return torch.zeros(())
    return torch.randn(result.shape, generator=generator).to(result.device, result.dtype)


def _widened(tensor: Any, generator: Any) -> Any:
    """In f64, moved up or down by one part in 2^24 where there is a generator."""
    if not is_float(tensor):
        return tensor
    wide = tensor.double()
    if generator is None:
        return wide
    signs = torch.randint(0, 2, wide.shape, generator=generator).to(wide.device).double() * 2 - 1
    return wide * (1 + signs * STEP)


# The catalogue under the names of torch.


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    return deuteron.act(x, act="gelu" if approximate == "none" else "gelu_tanh")


def _layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    if len(normalized_shape) != 1 or weight is None:
        raise ValueError("layer_norm: expected one axis and a weight")
    return deuteron.layer_norm(x, weight, bias, eps)


def _rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: Optional[float] = None) -> Any:
    if len(normalized_shape) != 1 or weight is None:
        raise ValueError("rms_norm: expected one axis and a weight")
    return deuteron.rms_norm(x, weight, _torch.rms_epsilon(x.dtype) if eps is None else eps)


def _softmax(x: Any, dim: int, *, dtype: Any = None) -> Any:
    if x.ndim < 1 or dim % max(x.ndim, 1) != x.ndim - 1 or dtype is not None:
        raise ValueError("softmax: expected the last axis")
    return deuteron.softmax(x)


def _attention(*operands: Any, dropout_p: float = 0.0, **words: Any) -> Any:
    if dropout_p:
        raise ValueError("scaled_dot_product_attention: dropout draws other numbers")
    from deuteron.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(*operands, **words)


def catalogue() -> Dict[str, Function]:
    """Functions of the catalogue that are one of torch, by the names of their OpInfos."""
    return {
        "nn.functional.gelu": _gelu,
        "nn.functional.silu": lambda x: deuteron.act(x, act="silu"),
        "nn.functional.relu": lambda x: deuteron.act(x, act="relu"),
        "nn.functional.layer_norm": _layer_norm,
        "nn.functional.rms_norm": _rms_norm,
        "softmax": _softmax,
        "nn.functional.scaled_dot_product_attention": _attention,
    }


# The samples.


def _norm_samples(device: str, dtype: Any, bias: bool) -> Iterable[Any]:
    """Rows longer than those of torch's samples, with one axis and a weight; the last are so small that the epsilon decides."""
    from torch.testing import make_tensor
    from torch.testing._internal.opinfo.core import SampleInput

    for shape, eps in (((3, 5, 65), 1e-5), ((129, 768), 1e-6), ((2, 1), 0.5), ((3, 65), None)):
        x = make_tensor(shape, device=device, dtype=dtype) * (1.0 if eps else 0.001)
        weights = [make_tensor(shape[-1:], device=device, dtype=dtype) for _ in range(1 + bias)]
        yield SampleInput(x, args=(shape[-1:], *weights), kwargs={"eps": eps} if eps else {})


OWN: Dict[str, Callable[[str, Any], Iterable[Any]]] = {
    "nn.functional.layer_norm": functools.partial(_norm_samples, bias=True),
    "nn.functional.rms_norm": functools.partial(_norm_samples, bias=False),
}
"""Samples of ours by the names of OpInfos: torch's own hardly have what the catalogue computes."""


class Case(NamedTuple):
    """Samples of one function of torch, and how it is called."""

    name: str
    dtype: str
    way: str
    """`function`, `method`, `operator`, `in place` or `catalogue`; with samples of ours `ours` or `ours, catalogue`"""
    samples: Callable[[], Iterable[Any]]
    function: Function
    candidate: Optional[Function]
    """what is called without `fuse`"""
    gradients: bool


def cases(op: Any, dtypes: Sequence[str], reference: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All that is asked of an OpInfo."""
    known, differentiable = op.supported_dtypes(device), op.supported_backward_dtypes(device)
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)
    for word in dtypes:
        dtype = DTYPES[word]
        if dtype not in known:
            continue
        gradients = dtype.is_floating_point and dtype in differentiable and op.supports_autograd

        def samples(dtype: Any = dtype, all_of_them: bool = reference) -> Iterable[Any]:
            draw = op.reference_inputs if all_of_them else op.sample_inputs
            return draw(device, dtype, requires_grad=False)  # type: ignore[no-any-return]

        yield Case(name, word, "function", samples, op.op, None, gradients)
        direct = catalogue().get(name)
        if direct is not None and dtype.is_floating_point:
            yield Case(name, word, "catalogue", samples, op.op, direct, gradients)
        own = OWN.get(name) if dtype.is_floating_point else None
        if own is not None:
            made = functools.partial(own, device, dtype)
            yield Case(name, word, "ours", made, op.op, None, gradients)
            yield Case(name, word, "ours, catalogue", made, op.op, direct, gradients)
        variants = {"method": op.method_variant, "operator": op.operator_variant, "in place": op.inplace_variant}
        for way, variant in variants.items() if word == "f32" else ():
            if variant is not None:
                named = getattr(variant, "__name__", None)
                called = variant if way == "operator" or named is None else _method(named)
                few = functools.partial(itertools.islice, samples(), 8)
                yield Case(name, word, way, few, called, None, gradients and way != "in place")


def _method(name: str) -> Function:
    return lambda x, *words, **named: getattr(x, name)(*words, **named)


class Count:
    """What became of the samples of a case."""

    def __init__(self) -> None:
        self.verdicts: Dict[str, int] = Counter()
        self.whys: Dict[Tuple[str, str], int] = Counter()
        self.worst = 0.0
        self.is_unknown = False
        """whether `fuse` knows no such function"""

    def add(self, outcome: Outcome, about: str) -> None:
        self.verdicts[outcome.verdict] += 1
        if outcome.verdict == "right":
            self.worst = max(self.worst, outcome.worst)
        elif outcome.why:
            self.whys[outcome.verdict, f"{outcome.why}{f'  [{about}]' if outcome.verdict == 'different' else ''}"] += 1


def ask(case: Case, most: Optional[int] = None) -> Count:
    """Runs the samples of a case, the first `most` of them."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    count = Count()
    unknown = 0
    for given in itertools.islice(case.samples(), most):
        if unknown == UNKNOWN == sum(count.verdicts.values()):
            count.is_unknown = True
            break
        sample = Sample(case.function, (given.input, *given.args), given.kwargs)
        if not sample.tensors or any(one.is_complex() or one.is_sparse or one.is_quantized for one in sample.tensors):
            continue
        if case.candidate is None:
            fused: Function = deuteron.fuse(lambda *tensors: sample(*tensors))
        else:
            fused = Sample(case.candidate, (given.input, *given.args), given.kwargs)
        try:
            outcome = judge(sample, fused, case.gradients, generator, case.name in CANCELS)
        except NotImplementedError:
            continue
        unknown += "cannot call it" in outcome.why or "no such attribute" in outcome.why
        count.add(outcome, repr(sample))
    deuteron.empty_cache()
    if torch.cuda.is_initialized():
        # A kernel that failed is an error here, and not a refusal of all that follows.
        torch.cuda.synchronize()
    return count


def part(all_of_them: Sequence[Any], word: str) -> Sequence[Any]:
    """The part `I/N` of a list; parts of all I from 1 to N are the list."""
    number, count = (int(one) for one in word.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"expected a part I/N with I from 1 to N, got {word!r}")
    return all_of_them[number - 1 :: count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ops", nargs="*", help="names of OpInfos [default: all]")
    parser.add_argument("--dtypes", nargs="*", choices=list(DTYPES), help="[default: all on the CPU, floats on a GPU]")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="a part of the functions")
    parser.add_argument("--reference", action="store_true", help="torch's reference samples")
    parser.add_argument("--most", type=int, help="samples of each function, dtype and way")
    parser.add_argument("--out", type=Path, help="a file of rows to append to")
    parser.add_argument("--commit", help="of the rows [default: that of the folder]")
    parser.add_argument("--list", choices=VERDICTS, default="different")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: expected a GPU that torch can use, got none")
    dtypes = arguments.dtypes or [word for word, dtype in DTYPES.items() if arguments.device == "cpu" or dtype in UNIT]
    try:
        asked = part(operators(), arguments.part)
    except ValueError as error:
        parser.error(f"--part: {error}")
    if arguments.out and _has_other_columns(arguments.out):
        parser.error(f"--out: expected a new file, or one with the columns {', '.join(HEAD)}; {arguments.out} has others")
    total: Dict[str, int] = Counter()
    rows: List[List[Any]] = []
    began = time.monotonic()
    for op in asked:
        if arguments.ops and op.name not in arguments.ops:
            continue
        before = len(rows)
        for case in cases(op, dtypes, arguments.reference, arguments.device):
            count = ask(case, arguments.most)
            if count.is_unknown:
                # Another way may be known.
                continue
            total.update(count.verdicts)
            numbers = [count.verdicts[word] for word in VERDICTS]
            if any(numbers):
                rows.append([case.name, case.dtype, case.way, *numbers, f"{count.worst:.3f}"])
            if arguments.list == "right" and numbers[0]:
                print(f"{case.name} {case.dtype} {case.way}: {numbers[0]} right, at most {count.worst:.3f} of the bound", flush=True)
            for (verdict, why), times in count.whys.items():
                if verdict in (arguments.list, "failed"):
                    print(f"{case.name} {case.dtype} {case.way}: {times} {verdict}: {why}", flush=True)
        if arguments.out:
            _append(arguments.out, rows[before:], arguments.commit)
    fused = {row[0] for row in rows if row[3]}
    samples = ", ".join(f"{total[word]} {word}" for word in VERDICTS)
    print(f"{len({row[0] for row in rows})} OpInfos, {len(fused)} of them computed; samples: {samples}; "
          f"{time.monotonic() - began:.0f} s, torch {torch.__version__}")
    return 1 if total["different"] or total["failed"] else 0


HEAD = ["op", "dtype", "way", *VERDICTS, "worst", "torch", "commit", "date"]


def _has_other_columns(path: Path) -> bool:
    return path.exists() and path.open(encoding="utf-8").readline().strip() != ",".join(HEAD)


def _append(path: Path, rows: Sequence[Sequence[Any]], commit: Optional[str]) -> None:
    if commit is None:
        words = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(words, capture_output=True, encoding="utf-8").stdout.strip()
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(HEAD)
        for row in rows:
            writer.writerow([*row, torch.__version__, commit, datetime.date.today().isoformat()])


if __name__ == "__main__":
    sys.exit(main())
