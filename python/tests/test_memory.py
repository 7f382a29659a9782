"""Programs share one workspace: many lengths take the memory of the longest, and what is dropped is freed."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest

import deuteron

ROWS = range(64, 1664, 25)
WIDTH = 512


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def chain() -> Any:
    """Two products: what lies between them is in the workspace."""
    return deuteron.fuse(lambda x, a, b: (x @ a) @ b, name="chain")


WEIGHTS = normal(8, WIDTH), normal(WIDTH, 8)


def stats() -> Dict[str, int]:
    return deuteron.memory_stats().get("cpu", dict(workspace_bytes=0, needed_bytes=0, programs=0))


@pytest.fixture(autouse=True)
def _nothing_left() -> None:
    """What earlier tests dropped is freed first."""
    gc.collect()
    deuteron.empty_cache()


def rows_beyond_others() -> int:
    """So many rows that a chain of them needs more than all programs of earlier tests, which ops of the catalogue keep."""
    return max(4096, 2 * stats()["needed_bytes"] // (WIDTH * 4))


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_many_sizes_take_the_workspace_of_the_largest() -> None:
    alone = chain()
    alone(normal(ROWS[-1], 8), *WEIGHTS)
    largest = stats()["needed_bytes"]
    assert largest >= ROWS[-1] * WIDTH * 4
    fused, before = chain(), resident()
    for rows in ROWS:
        fused(normal(rows, 8), *WEIGHTS)
    after = stats()
    # Scratch of some smaller sizes is larger, as they take other kernels.
    assert after["workspace_bytes"] == after["needed_bytes"] <= 2 * largest
    assert after["programs"] >= len(ROWS)
    # One workspace for each size would be this much; a quarter leaves room for programs and for what allocators keep.
    apart = sum(rows * WIDTH * 4 for rows in ROWS)
    assert resident() - before <= apart / 4 + 2 * largest


def test_what_is_dropped_is_freed() -> None:
    before = stats()
    fused = chain()
    fused(normal(rows_beyond_others(), 8), *WEIGHTS)
    assert stats()["needed_bytes"] > before["needed_bytes"]
    del fused
    gc.collect()
    assert stats()["needed_bytes"] == before["needed_bytes"] and stats()["programs"] == before["programs"]
    assert stats()["workspace_bytes"] <= before["needed_bytes"]


def test_traces_that_are_dropped_are_freed() -> None:
    fused, many = deuteron.fuse(lambda x, a, b: (x @ a) @ b, traces=1), rows_beyond_others()
    fused(normal(many, 8), *WEIGHTS)
    assert stats()["needed_bytes"] >= many * WIDTH * 4
    fused(normal(64, 8), *WEIGHTS)
    assert stats()["needed_bytes"] < many * WIDTH * 4


def test_an_empty_cache_fills_again() -> None:
    fused, x = chain(), normal(128, 8)
    expected = fused(x, *WEIGHTS)
    deuteron.empty_cache()
    assert stats()["workspace_bytes"] == 0 and stats()["needed_bytes"] > 0
    assert np.array_equal(fused(x, *WEIGHTS), expected)
    assert stats()["workspace_bytes"] == stats()["needed_bytes"]


def test_threads_share_it_in_turn() -> None:
    fused, wrong = chain(), [0]
    expected = {rows: normal(rows, 8) @ WEIGHTS[0] @ WEIGHTS[1] for rows in (16, 64, 256)}

    def work(rows: int) -> None:
        for turn in range(30):
            got = fused(normal(rows, 8), *WEIGHTS)
            # Sums of 512 terms of size about 3.
            if np.abs(got - expected[rows]).max() > 2.0**-23 * np.abs(expected[rows]).max() * WIDTH:
                wrong[0] += 1
            if turn % 10 == 5:
                deuteron.empty_cache()

    threads: List[threading.Thread] = [threading.Thread(target=work, args=(rows,)) for rows in expected for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0]


def test_a_patched_model_over_many_lengths() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from test_gpt2 import tiny, tokens

    batch, model, before = 2, tiny(), stats()

    def step(model: Any, length: int) -> None:
        with torch.no_grad():
            model(tokens(batch, length))
        model(tokens(batch, length), labels=tokens(batch, length)).loss.backward()

    report = deuteron.patch(model, strict=True)
    step(model, 250)
    while stats()["needed_bytes"] <= before["needed_bytes"]:
        # Programs of earlier tests need more.
        batch *= 2
        step(model, 250)
    longest, lengths = stats()["needed_bytes"], [3, 250, *range(7, 250, 9)]
    for length in lengths:
        step(model, length)
    assert report.fallbacks == {}
    # One workspace for all lengths. The plan of a shorter one may need more than that of the longest.
    largest = stats()["needed_bytes"]
    assert longest <= largest <= 1.5 * longest
    for length in lengths[:5]:
        step(model, length)
    assert stats()["needed_bytes"] == largest == stats()["workspace_bytes"]
    assert stats()["programs"] >= before["programs"] + 3 * len(lengths) - 3
    deuteron.unpatch(model)
    del model, report
    gc.collect()
    assert stats()["needed_bytes"] < largest and stats()["workspace_bytes"] <= stats()["needed_bytes"]
