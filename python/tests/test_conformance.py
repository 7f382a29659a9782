"""A part of PyTorch's own samples, and of random models; `conformance.py` and `random_gpt2.py` run all of them."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any, Dict, Iterable

import pytest

torch = pytest.importorskip("torch")

import conformance  # noqa: E402
import deuteron  # noqa: E402

# OpInfos whose samples once found something, and the functions that models are made of.
NAMES = [
    "argmax",
    "cat",
    "clamp",
    "linalg.norm",
    "log_softmax",
    "max.reduction_with_dim",
    "nn.functional.cosine_similarity",
    "nn.functional.cross_entropy",
    "nn.functional.gelu",
    "nn.functional.layer_norm",
    "nn.functional.rms_norm",
    "nn.functional.scaled_dot_product_attention",
    "ones_like",
    "softmax",
    "sum",
    "var",
    "where",
]


@pytest.fixture(scope="module")
def operators() -> Dict[str, Any]:
    found = conformance.operators()
    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in found}


def check_samples(cases: Iterable[conformance.Case], most: int) -> None:
    right = 0
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            count = conformance.ask(case, most=most)
        different = [why for verdict, why in count.whys if verdict in ("different", "failed")]
        assert not different, f"{case.dtype}, {case.way}: {different}"
        right += count.verdicts["right"]
    assert right > 0


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_torch_are_right_or_refused(operators: Dict[str, Any], name: str) -> None:
    check_samples(conformance.cases(operators[name], ["f32", "bf16", "i64"]), most=5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_samples_on_a_gpu_are_right_or_refused(operators: Dict[str, Any], name: str) -> None:
    check_samples(conformance.cases(operators[name], ["f32", "bf16"], device="cuda"), most=2)


def test_parts_are_the_whole() -> None:
    names = list(range(10))
    parts = [conformance.part(names, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(one for part in parts for one in part) == names
    assert all(parts) and conformance.part(names, "1/1") == names
    for wrong in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(ValueError):
            conformance.part(names, wrong)


def test_an_unknown_way_hides_no_others(operators: Dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """`fuse` knows no `exp_`, which is asked before the narrow dtypes are."""
    rows = tmp_path / "rows.csv"
    words = ["--ops", "exp", "--dtypes", "f32", "bf16", "--commit", "none", "--out", str(rows)]
    monkeypatch.setattr("sys.argv", ["conformance.py", *words])
    monkeypatch.setattr(conformance, "operators", lambda: [operators["exp"]])
    monkeypatch.setattr(conformance, "UNKNOWN", 1)
    assert conformance.main() == 0
    asked = {(row["dtype"], row["way"]) for row in csv.DictReader(rows.open(encoding="utf-8"))}
    assert ("bf16", "function") in asked and ("f32", "in place") not in asked, asked


def raising(error: Exception) -> Any:
    def candidate(x: Any) -> Any:
        raise error

    return candidate


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.exp(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient / 2


@pytest.mark.parametrize(
    "function, candidate, verdict",
    [
        (torch.log1p, torch.log1p, "right"),
        (torch.log1p, lambda x: torch.log(1 + x), "different"),
        (torch.exp, Halved.apply, "different"),
        (torch.exp, lambda x: torch.exp(x)[:2], "different"),
        (torch.exp, lambda x: torch.exp(x).double(), "different"),
        (torch.exp, deuteron.fuse(lambda x: torch.exp(x)), "right"),
        (torch.exp, deuteron.fuse(lambda x: x.nonzero()), "refused"),
        (torch.argmax, lambda x: torch.argmax(x) + 1, "different"),
        (torch.exp, raising(TypeError("exp: expected a float operand")), "refused"),
        (torch.exp, raising(RuntimeError("exp: NVRTC: kernel did not compile")), "failed"),
        (torch.exp, raising(MemoryError("exp: could not allocate 8 bytes")), "failed"),
        (torch.exp, raising(KeyError("x")), "failed"),
        (lambda x: x @ x[:2], raising(ValueError("matmul: expected 3 rows, got 2")), "refused"),
        (lambda x: x @ x[:2], raising(MemoryError("matmul: could not allocate 8 bytes")), "failed"),
        (lambda x: torch.cat([x, x[:, :1]]), deuteron.fuse(lambda x: x + 1), "different"),
    ],
)
def test_what_differs_is_found(function: Any, candidate: Any, verdict: str) -> None:
    x = torch.tensor([1e-6, 0.5, 3.0])
    sample = conformance.Sample(function, (x,), {})
    outcome = conformance.judge(sample, candidate, True, torch.Generator().manual_seed(0))
    assert outcome.verdict == verdict, outcome


def test_random_models_are_equal_or_fall_back() -> None:
    pytest.importorskip("transformers")
    import random_gpt2

    outcomes = [(run, outcome) for run, outcome in random_gpt2.runs(seed=4, configs=2)]
    assert not [f"{run}: {outcome.why}" for run, outcome in outcomes if outcome.verdict == "different"]
    assert {outcome.verdict for _, outcome in outcomes} == {"equal", "fallback"}


def test_a_model_that_differs_is_found(monkeypatch: Any) -> None:
    pytest.importorskip("transformers")
    import random_gpt2

    monkeypatch.setattr(deuteron, "patch", _scaled)
    monkeypatch.setattr(deuteron, "unpatch", lambda model: getattr(model, "transformer", model).ln_f._forward_hooks.clear())
    run = random_gpt2.draw(4, 0)[0]
    assert random_gpt2.judge(run).verdict == "different"


def _scaled(model: Any) -> Any:
    """In place of `patch`: a model whose hidden states are off by three hundredths."""
    base = getattr(model, "transformer", model)
    base.ln_f.register_forward_hook(lambda module, given, y: y * 1.03)
    return deuteron._gpt2_report.Report()  # type: ignore[attr-defined]
