"""A short form of `memory_gpt2.py`, and that it finds growth."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Dict

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import memory_gpt2  # noqa: E402

SHORT = ["--steps", "60", "--longest", "512", "--batch", "4", "--width", "64", "--vocabulary", "512"]


def test_a_patched_model_takes_little_more_memory_over_many_lengths() -> None:
    """Each run in a process of its own, so of what it adds there. One workspace for each length would be several times as much."""
    arguments = memory_gpt2.parsed(SHORT)
    other, mine = (memory_gpt2.apart(arguments, "training", patched) for patched in (False, True))
    added, bound = mine["peak"] - mine["before"], memory_gpt2.LIMIT * (other["peak"] - other["before"]) + mine["workspace_bytes"]
    # A forward, its gradient and a loss for nearly each of the lengths; what allocators keep is less than this.
    assert mine["programs"] >= 100
    assert added <= bound + (32 << 20), (other, mine)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", memory_gpt2.MODES)
def test_a_patched_model_on_a_gpu_stays_within_its_share_of_memory(mode: str) -> None:
    row = memory_gpt2.measured(memory_gpt2.parsed([*SHORT, "--device", "cuda"]), mode)
    assert row["share"] <= 1, row


@pytest.mark.parametrize("patched, code", [(1_290, 0), (1_320, 1)])
def test_growth_is_found(patched: int, code: int, tmp_path: Path, monkeypatch: Any) -> None:
    def apart(arguments: Any, mode: str, is_patched: bool) -> Dict[str, Any]:
        peak, workspace = (patched, 100) if is_patched else (1_000, 0)
        return dict(before=500, peak=peak, seconds=1.0, workspace_bytes=workspace, programs=3)

    out = tmp_path / "rows.csv"
    monkeypatch.setattr(memory_gpt2, "apart", apart)
    monkeypatch.setattr("sys.argv", ["memory_gpt2.py", "--out", str(out), "--commit", "none"])
    assert memory_gpt2.main() == code
    assert [row["share"] for row in csv.DictReader(out.open(encoding="utf-8"))] == [f"{patched / 1300:.3f}"] * 2
