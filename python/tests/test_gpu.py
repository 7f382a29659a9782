"""The functions over tensors on a GPU: values and gradients, streams, graphs, and mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, List

import pytest

torch = pytest.importorskip("torch")

import deuteron  # noqa: E402
from cases import CASES, DIFFERENTIABLE, HEADS, Size, Torch, check, listed  # noqa: E402
from test_torch import both_ways, compare, leaves, tensors  # noqa: E402

pytestmark = pytest.mark.gpu

FOLDER = Path(deuteron.__file__).resolve().parents[1]


def normal(*shape: int, dtype: Any = None, seed: int = 0) -> Any:
    """Numbers on the GPU, the same each time."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to("cuda", dtype or torch.float32)


# Values and gradients. Kernels are compiled for each, so each dtype has one size an op.


@pytest.mark.parametrize("name, size", [(name, case.sizes[2]) for name, case in CASES.items()])
def test_in_bf16(name: str, size: Size) -> None:
    compare(CASES[name], size, torch.bfloat16, "cuda")


@pytest.mark.parametrize("name, size", [(name, case.sizes[1]) for name, case in CASES.items()])
def test_in_f16(name: str, size: Size) -> None:
    compare(CASES[name], size, torch.float16, "cuda")


@pytest.mark.parametrize("name, size", [(name, case.sizes[-1]) for name, case in CASES.items()])
def test_in_f32(name: str, size: Size) -> None:
    compare(CASES[name], size, torch.float32, "cuda")


@pytest.mark.parametrize(
    "name", ["norm_act-layer-gelu", "add_norm-rms", "bias_dropout_add", "attention-causal", "ffn-layer"]
)
def test_of_a_usual_size(name: str) -> None:
    case = CASES[name]
    compare(case, (257, 64) if case.sizes is HEADS else (2048, 768), torch.bfloat16, "cuda")


def test_the_same_bits_each_time() -> None:
    for name in DIFFERENTIABLE[::3]:
        case = CASES[name]
        given = tensors(case, case.sizes[2], torch.bfloat16, device="cuda")
        first, again = (
            [*results, *gradients] for results, gradients, _ in (both_ways(case.call, given) for _ in range(2))
        )
        assert all(map(torch.equal, first, again)), name


def test_a_seed_drops_what_it_drops_on_the_cpu() -> None:
    x = torch.ones(100, 129)
    here, there = deuteron.act_dropout(x, 0.25, 5, act="relu"), deuteron.act_dropout(x.cuda(), 0.25, 5, act="relu")
    assert torch.equal(here != 0, there.cpu() != 0)
    torch.cuda.manual_seed(3)
    first = deuteron.act_dropout(x.cuda(), 0.25)
    torch.cuda.manual_seed(3)
    assert torch.equal(first, deuteron.act_dropout(x.cuda(), 0.25))
    assert not torch.equal(first, deuteron.act_dropout(x.cuda(), 0.25))


def test_what_is_dropped_follows_the_state_of_the_generator() -> None:
    x = torch.ones(40, 129, device="cuda")

    def drop() -> Any:
        return deuteron.act_dropout(x, 0.5, act="relu")

    torch.cuda.manual_seed(7)
    # More than are drawn at a time, and between them what torch draws itself.
    masks = []
    for index in range(600):
        masks.append(drop() != 0)
        if index % 100 == 50:
            torch.rand(5, device="cuda")
    every = torch.stack(masks)
    assert torch.unique(every.flatten(1).int(), dim=0).shape[0] == 600, "no two are alike"
    kept = every.float().mean()
    assert abs(kept - 0.5) < 5 * (0.25 / every.numel()) ** 0.5
    state = torch.cuda.get_rng_state()
    expected = [drop() for _ in range(3)]
    torch.rand(5, device="cuda")
    torch.cuda.set_rng_state(state)
    assert all(map(torch.equal, expected, [drop() for _ in range(3)])), "a state that is set again"
    torch.cuda.set_rng_state(state)
    with torch.cuda.stream(torch.cuda.Stream()):
        elsewhere = [drop() for _ in range(3)]
    torch.cuda.synchronize()
    assert all(map(torch.equal, expected, elsewhere)), "another stream"
    torch.cuda.set_rng_state(state)
    torch.cuda.synchronize()
    plain = torch.rand(5, device="cuda")
    torch.cuda.set_rng_state(state)
    drop()
    assert not torch.equal(plain, torch.rand(5, device="cuda")), "torch does not draw the same again"


def test_a_checkpoint_drops_the_same_again() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.cuda.manual_seed(1)
    x = torch.ones(64, 256, device="cuda", requires_grad=True)
    y = checkpoint(lambda x: deuteron.act_dropout(x, 0.5, act="relu"), x, use_reentrant=False)
    deuteron.act_dropout(x.detach(), 0.5)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y.detach())


def test_who_looks_at_calls_changes_nothing_that_is_dropped() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.ones(64, 256, device="cuda", requires_grad=True)
    for seed in (11, 12):
        torch.cuda.manual_seed(seed)
        expected = deuteron.act_dropout(x, 0.5)
        torch.cuda.manual_seed(seed + 100)
        deuteron.act_dropout(x, 0.5)
        torch.cuda.manual_seed(seed)
        with FlopCounterMode(display=False):
            y = deuteron.act_dropout(x, 0.5)
        assert torch.equal(expected, y), "a mode"
        y.sum().backward()
    torch.cuda.manual_seed(13)
    with pytest.raises(NotImplementedError):
        torch.func.grad(lambda x: deuteron.act_dropout(x, 0.5).sum())(x)
    deuteron.act_dropout(x, 0.5).sum().backward()


def test_what_inference_draws_trains() -> None:
    """The first of many seeds is drawn under inference mode, the next is saved for a gradient."""
    torch.cuda.manual_seed(2)
    x = torch.ones(64, 256, device="cuda", requires_grad=True)
    with torch.inference_mode():
        deuteron.act_dropout(x, 0.5)
    y = deuteron.act_dropout(x, 0.5, act="relu")
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y.detach())


# Memory.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_and_addresses(dtype: Any) -> None:
    """Rows apart, columns apart, and rows that begin where no vector does."""
    x, w, b = normal(3, 5, 72, dtype=dtype), normal(72, dtype=dtype, seed=1), normal(72, dtype=dtype, seed=2)
    expected = deuteron.norm_act(x, w, b)
    padded = torch.zeros(3, 9, 91, dtype=dtype, device="cuda")
    padded[:, 2:7, 3:75] = x
    wide = torch.zeros(3, 5, 144, dtype=dtype, device="cuda")
    wide[..., ::2] = x
    shifted = torch.zeros(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape)
    shifted.copy_(x)
    for strided in (
        padded[:, 2:7, 3:75],
        wide[..., ::2],
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.mT.contiguous().mT,
        shifted,
    ):
        assert torch.equal(strided, x)
        assert torch.equal(deuteron.norm_act(strided, w, b), expected)
        own = strided.detach().requires_grad_()
        plain = x.clone().requires_grad_()
        gradient = strided.detach() * 2
        got = torch.autograd.grad(deuteron.norm_act(own, w, b), own, gradient)[0]
        assert torch.equal(got, torch.autograd.grad(deuteron.norm_act(plain, w, b), plain, gradient.contiguous())[0])


def test_no_rows() -> None:
    for name in ("act-gelu", "bias_dropout_add", "add_norm-layer", "softmax", "linear_act", "norm_quantize-layer"):
        case = CASES[name]
        given = tensors(case, (0, 8), torch.bfloat16, device="cuda")
        assert all(one.numel() == 0 for one in listed(case.call(*given))), name
    x, w = torch.zeros(0, 8, device="cuda", requires_grad=True), torch.ones(8, device="cuda", requires_grad=True)
    deuteron.rms_norm(x, w).sum().backward()
    assert x.grad.shape == (0, 8) and torch.equal(w.grad, torch.zeros_like(w))


def test_memory_is_given_back() -> None:
    """Calls leave nothing behind: the caching allocator has what it had before."""
    x, w = normal(512, 768).requires_grad_(), normal(768)

    def step() -> None:
        torch.autograd.grad(deuteron.norm_act(x, w).sum(), x)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


# Streams.


def test_work_is_enqueued_on_the_current_stream() -> None:
    """An operand that a stream writes late is read after that, and a result is there when the stream has ended."""
    source, w = normal(1024, 768), normal(768, seed=1)
    expected = deuteron.norm_act(source, w)
    x = torch.zeros_like(source)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(3):
            x.zero_()
            torch.cuda._sleep(20_000_000)
            x.copy_(source)
            y = deuteron.norm_act(x, w)
            z = y + 1
    side.synchronize()
    assert torch.equal(y, expected) and torch.equal(z, expected + 1)


def test_backward_runs_on_the_stream_of_forward() -> None:
    source, w = normal(1024, 768), normal(768, seed=1)
    own = source.clone().requires_grad_()
    (expected,) = torch.autograd.grad(deuteron.norm_act(own, w).sum(), own)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x = torch.zeros_like(source)
        torch.cuda._sleep(20_000_000)
        x = x.copy_(source).requires_grad_()
        (found,) = torch.autograd.grad(deuteron.norm_act(x, w).sum(), x)
    side.synchronize()
    assert torch.equal(found, expected)


def test_one_program_on_two_streams() -> None:
    """Runs of one program on several streams do not get into each other's way."""
    sources = [normal(1024, 768, seed=seed) for seed in range(4)]
    w = normal(768, seed=9)
    expected = [deuteron.norm_act(source, w) for source in sources]
    streams = [torch.cuda.Stream() for _ in sources]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        for source, stream in zip(sources, streams):
            with torch.cuda.stream(stream):
                results.append(deuteron.norm_act(source, w))
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, expected))


# CUDA graphs.


def captured(work: Callable[[], Any]) -> Any:
    """A graph of some work after three runs of it, and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results


def test_a_graph_is_replayed_with_other_contents() -> None:
    x, r, w, b = normal(256, 768), normal(256, 768), normal(768, seed=1), normal(768, seed=2)
    weight, bias = normal(768, 64, seed=3), normal(64, seed=4)

    def work() -> List[Any]:
        y, s = deuteron.add_norm(x, r, w, b)
        return [s, deuteron.linear_act(deuteron.act(y), weight, bias)]

    graph, results = captured(work)
    for seed in range(3):
        x.copy_(normal(256, 768, seed=10 + seed))
        r.copy_(normal(256, 768, seed=20 + seed))
        graph.replay()
        assert all(map(torch.equal, results, work()))


def test_attention_in_a_graph() -> None:
    q, k, v = (normal(2, 4, 129, 64, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    graph, results = captured(lambda: [deuteron.attention(q, k, v)])
    for seed in range(3):
        q.copy_(normal(2, 4, 129, 64, seed=5 + seed))
        graph.replay()
        assert torch.equal(results[0], deuteron.attention(q, k, v))


def test_a_training_step_in_a_graph() -> None:
    x, w, b = leaves([normal(256, 768), normal(768, seed=1), normal(768, seed=2)])

    def work() -> Any:
        return torch.autograd.grad(deuteron.norm_act(x, w, b).square().sum(), (x, w, b))

    graph, results = captured(work)
    for seed in range(3):
        with torch.no_grad():
            x.copy_(normal(256, 768, seed=10 + seed))
        graph.replay()
        assert all(map(torch.equal, results, work()))


def test_each_replay_drops_other_elements() -> None:
    x, b = torch.ones(256, 768, device="cuda"), torch.zeros(768, device="cuda")
    graph, (y,) = captured(lambda: [deuteron.bias_dropout_add(x, b, x, p=0.5)])
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(y.clone())
    assert not any(torch.equal(seen[one], seen[other]) for one, other in ((0, 1), (1, 2), (0, 2)))
    assert all(abs((one == 1).float().mean().item() - 0.5) < 0.01 for one in seen)
    torch.cuda.manual_seed(7)
    graph.replay()
    first = y.clone()
    torch.cuda.manual_seed(7)
    graph.replay()
    assert torch.equal(y, first)


# Ways of torch.


def test_autocast() -> None:
    x, weight, bias = leaves([normal(33, 64), normal(64, 48, seed=1) / 8, normal(48, seed=2)])
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype):
            y = deuteron.linear_act(x, weight, bias)
            assert y.dtype == dtype
            assert deuteron.layer_norm(x, bias.new_ones(64), bias.new_zeros(64)).dtype == torch.float32
        gradients = torch.autograd.grad(y.float().square().sum(), (x, weight, bias))
        assert all(one.dtype == torch.float32 for one in gradients)


def test_a_compiled_block() -> None:
    torch._dynamo.reset()

    def block(x: Any, w: Any, b: Any) -> Any:
        y, s = deuteron.add_norm(x * 2, x, w, b)
        return deuteron.act(y) + s

    given = [normal(64, 128), normal(128, seed=1), normal(128, seed=2)]
    results, gradients, incoming = both_ways(block, given)
    compiled, found, _ = both_ways(torch.compile(block, backend="aot_eager", fullgraph=True), given, incoming)
    assert all(map(torch.equal, [*compiled, *found], [*results, *gradients]))


def test_a_scaled_step() -> None:
    """Of AMP: `GradScaler` multiplies the loss, and gradients stay finite in f16."""
    x, weight, bias = leaves([normal(33, 64), normal(64, 48, seed=1) / 8, normal(48, seed=2)])
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    before = weight.detach().clone()
    with torch.autocast("cuda", torch.float16):
        loss = deuteron.linear_act(x, weight, bias).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.isfinite(weight).all() and not torch.equal(weight, before)


# Mistakes.


def test_tensors_of_two_devices() -> None:
    x, w = normal(3, 8), normal(8)
    for call in (
        lambda: deuteron.rms_norm(x, w.cpu()),
        lambda: deuteron.rms_norm(x.cpu(), w),
        lambda: deuteron.rms_norm(x.requires_grad_(), w.cpu()),
        lambda: deuteron.rms_norm(x, w.cpu().numpy()),
    ):
        with pytest.raises(TypeError, match="^rms_norm: expected"):
            call()
    with pytest.raises(TypeError, match="^act_dropout: expected all tensors on one device.*`seed` on cpu"):
        deuteron.act_dropout(x.detach(), 0.5, torch.zeros((), dtype=torch.int32))


def test_doubles_are_for_the_cpu() -> None:
    x = normal(3, 8).double()
    with pytest.raises(TypeError, match="^act: float64 is computed on the CPU alone, got tensors on cuda:0"):
        deuteron.act(x)


def test_shapes_and_dtypes_are_told() -> None:
    x = normal(3, 8)
    with pytest.raises(ValueError, match="^add_act: .*expected shapes"):
        deuteron.add_act(x, normal(3, 7))
    with pytest.raises(ValueError, match="^add_act: .*one dtype"):
        deuteron.add_act(x, x.half())
    with pytest.raises(TypeError, match="^norm_quantize: it has no gradient"):
        deuteron.norm_quantize(x.requires_grad_(), normal(8))


def test_a_token_that_is_not_in_the_table_is_told_later() -> None:
    """The GPU meets it after the call has returned: a later call of the op tells, and the ones after it are well."""
    table, w = normal(5, 64), normal(64, seed=1)
    good, bad = (torch.tensor([[0, token]], device="cuda") for token in (4, 5))
    expected = deuteron.embed_norm(good, table, table, w)
    with pytest.raises(IndexError, match="embed_norm"):
        for _ in range(3):
            deuteron.embed_norm(bad, table, table, w)
            torch.cuda.synchronize()
    for _ in range(3):
        try:
            deuteron.embed_norm(good, table, table, w)
        except IndexError:
            # That of the last bad call.
            continue
        torch.cuda.synchronize()
    assert all(map(torch.equal, deuteron.embed_norm(good, table, table, w), expected))


def test_a_target_that_is_no_class_is_told_later() -> None:
    """The loss without logits checks its targets on Hopper: a later call of the op tells, and the ones after it are well."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only kernels for Hopper check targets")
    x, w = normal(300, 64, dtype=torch.bfloat16), normal(500, 64, dtype=torch.bfloat16, seed=1)
    good = torch.full((300,), 499, device="cuda")
    expected = deuteron.linear_cross_entropy(x, w, good)
    for target in (500, -1):
        bad = good.clone()
        bad[200] = target
        with pytest.raises(IndexError, match="linear_cross_entropy"):
            for _ in range(3):
                deuteron.linear_cross_entropy(x, w, bad)
                torch.cuda.synchronize()
        for _ in range(3):
            try:
                deuteron.linear_cross_entropy(x, w, good)
            except IndexError:
                # That of the last bad call.
                continue
            torch.cuda.synchronize()
        assert torch.equal(deuteron.linear_cross_entropy(x, w, good), expected), target


# Processes.


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=environment, timeout=120, cwd=FOLDER
    )


def test_an_import_leaves_the_gpu_alone() -> None:
    code = """
import torch

def nodes():
    with open("/proc/self/maps") as maps:
        return sorted(line.split()[-1] for line in maps if "/dev/nvidia" in line)

# What torch itself opens for a gradient is its own affair.
torch.ones(3, 4, requires_grad=True).sum().backward()
before = nodes()
import deuteron, deuteron.nn
assert not torch.cuda.is_initialized()
deuteron.norm_act(torch.ones(3, 4, requires_grad=True), torch.ones(4)).sum().backward()
assert not torch.cuda.is_initialized() and nodes() == before, (before, nodes())
deuteron.act(torch.ones(3, 4, device="cuda"))
assert torch.cuda.is_initialized()
"""
    ran = python(code)
    assert ran.returncode == 0, ran.stderr


def test_a_forked_process_goes_on_with_the_cpu() -> None:
    code = """
import os, torch, deuteron
x = torch.randn(300, 129)
here, there = deuteron.softmax(x), deuteron.softmax(x.cuda())
child = os.fork()
if child == 0:
    # PyTorch's own parallel operations, such as `torch.equal` of this size, wait forever in a child of a process that ran on OpenMP's threads.
    os._exit(0 if deuteron.softmax(x).numpy().tobytes() == here.numpy().tobytes() else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(deuteron.softmax(x.cuda()), there)
"""
    ran = python(code)
    assert ran.returncode == 0, ran.stderr


def test_the_doctor_names_the_gpu() -> None:
    assert torch.cuda.get_device_name(0) in repr(deuteron.doctor())


def test_long_rows_are_as_near_as_those_of_torch() -> None:
    """A vocabulary, of which a row is longer than a block has threads."""
    x = normal(3, 50257, dtype=torch.bfloat16)
    exact = x.double().softmax(-1)
    check(deuteron.softmax(x), x.softmax(-1), exact, "bfloat16", 50257)
    w, b = normal(16384, dtype=torch.bfloat16, seed=1), normal(16384, dtype=torch.bfloat16, seed=2)
    x = normal(3, 16384, dtype=torch.bfloat16, seed=3)
    exact = Torch.norm(x.double(), w.double(), b.double())
    check(deuteron.layer_norm(x, w, b), Torch.norm(x, w, b), exact, "bfloat16", 16384)
