"""Programs on a GPU share one workspace per stream: many lengths take the memory of the longest, and what is dropped is freed."""

from __future__ import annotations

import gc
import random
from typing import Any, Dict

import pytest

torch = pytest.importorskip("torch")

import deuteron  # noqa: E402
from test_gpu import captured, normal  # noqa: E402

pytestmark = pytest.mark.gpu

WIDTH = 2048


def stats() -> Dict[str, int]:
    nothing = dict(workspace_bytes=0, needed_bytes=0, programs=0)
    return deuteron.memory_stats().get(f"cuda:{torch.cuda.current_device()}", nothing)


def chain(**words: Any) -> Any:
    """Two matmuls: what lies between them is in the workspace."""
    return deuteron.fuse(lambda x, a, b: (x @ a) @ b, name="chain", **words)


@pytest.fixture()
def empty() -> None:
    """What earlier tests dropped is freed first."""
    gc.collect()
    torch.cuda.synchronize()
    deuteron.empty_cache()


def near(found: Any, x: Any, a: Any, b: Any) -> bool:
    """Within the rounding of two matmuls with f32 sums, or TF32 products."""
    exact = x.double() @ a.double() @ b.double()
    return bool((found.double() - exact).abs().max() <= 2.0**-9 * exact.abs().max())


def test_programs_on_a_stream_share_a_workspace(empty: None) -> None:
    fused, a, b = chain(), normal(64, WIDTH, seed=1), normal(WIDTH, 64, seed=2)
    before = stats()
    for rows in (4096, 512, 2048):
        x = normal(rows, 64, seed=rows)
        assert near(fused(x, a, b), x, a, b)
    torch.cuda.synchronize()
    one = stats()
    assert one["programs"] == before["programs"] + 3
    assert 4096 * WIDTH * 4 <= one["workspace_bytes"] <= one["needed_bytes"] < (4096 + 2048) * WIDTH * 4
    with torch.cuda.stream(torch.cuda.Stream()):
        x = normal(2048, 64)
        torch.cuda.current_stream().synchronize()
        assert near(fused(x, a, b), x, a, b)
    torch.cuda.synchronize()
    assert stats()["workspace_bytes"] >= one["workspace_bytes"] + 2048 * WIDTH * 4, "another stream has its own"
    deuteron.empty_cache()
    assert stats()["workspace_bytes"] <= before["workspace_bytes"]
    x = normal(512, 64)
    assert near(fused(x, a, b), x, a, b)
    torch.cuda.synchronize()
    del fused
    gc.collect()
    assert stats()["programs"] == before["programs"] and stats()["needed_bytes"] == before["needed_bytes"]


def test_two_thousand_lengths_take_one_workspace(empty: None) -> None:
    fused, a, b = chain(), normal(64, WIDTH, seed=1), normal(WIDTH, 64, seed=2)
    source = normal(2048, 64, seed=3)
    own, largest = stats()["needed_bytes"], 2048 * WIDTH * 4
    lengths = random.Random(7).choices(range(1, 2049), k=2000)
    for turn, rows in enumerate(lengths):
        found = fused(source[:rows], a, b)
        if turn % 100 == 0:
            assert near(found, source[:rows], a, b), rows
    torch.cuda.synchronize()
    assert stats()["workspace_bytes"] <= own + 1.2 * largest + (4 << 20)
    del fused
    gc.collect()
    assert stats()["needed_bytes"] == own and stats()["workspace_bytes"] <= own


def test_a_model_over_many_lengths_takes_one_workspace(empty: None) -> None:
    pytest.importorskip("transformers")
    from test_gpt2 import tiny, tokens

    def step(model: Any, length: int) -> None:
        batch = tokens(2, length).cuda()
        with torch.no_grad():
            model(batch)
        model(batch, labels=batch).loss.backward()

    model, before = tiny().cuda(), stats()
    report = deuteron.patch(model, strict=True)
    step(model, 250)
    torch.cuda.synchronize()
    longest = stats()["workspace_bytes"] - before["workspace_bytes"]
    for length in random.Random(8).choices(range(3, 251), k=60):
        step(model, length)
    torch.cuda.synchronize()
    assert report.fallbacks == {}
    # The plan of a shorter length may need more than that of the longest.
    assert stats()["workspace_bytes"] - before["workspace_bytes"] <= 1.5 * longest + (4 << 20)
    deuteron.unpatch(model)
    del model, report
    gc.collect()
    assert stats()["needed_bytes"] <= before["needed_bytes"]


def test_a_graph_outlives_the_workspace_of_its_stream(empty: None) -> None:
    fused, a, b = chain(), normal(64, WIDTH, seed=1), normal(WIDTH, 64, seed=2)
    x = normal(256, 64)
    graph, (y,) = captured(lambda: [fused(x, a, b)])
    for rows in (300, 4096):
        # Workspaces grow, are freed and are made again, on the stream of the replays and on another one.
        deuteron.empty_cache()
        fused(normal(rows, 64), a, b)
        x.copy_(normal(256, 64, seed=rows))
        graph.replay()
        fused(normal(2 * rows, 64), a, b)
        torch.cuda.synchronize()
        assert near(y, x, a, b)
