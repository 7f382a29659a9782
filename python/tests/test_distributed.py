"""A patched GPT-2 on two processes: gradients are those of the unpatched model on one, and steps of our optimiser those of torch's."""

from __future__ import annotations

import copy
import functools
import itertools
import os
from typing import Any, Dict

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

import torch.distributed as distributed  # noqa: E402

RANKS, BATCH, LENGTH, VOCABULARY = 2, 4, 12, 128


def tiny() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    sizes = dict(n_layer=2, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=32)
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))
    return model.train()


def tokens() -> Any:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))


def gradients(model: Any, ids: Any) -> Dict[str, Any]:
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def data_parallel(model: Any, ids: Any, first: bool) -> Dict[str, Any]:
    """DDP, patched before it wraps the model or after."""
    import deuteron

    if first:
        deuteron.patch(model, strict=True)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    report = deuteron.patch(wrapped, strict=True)
    found = gradients(wrapped, ids)
    assert report.fallbacks == {}, report
    return {name.removeprefix("module."): gradient for name, gradient in found.items()}


def flat_sharded(model: Any, ids: Any, first: bool) -> Dict[str, Any]:
    """FSDP by wrappers: the parameters of a block are views of a flat one."""
    import deuteron
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    if first:
        deuteron.patch(model, strict=True)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block})
    device = torch.device("cpu")
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    report = deuteron.patch(wrapped, strict=True)
    wrapped(ids, labels=ids, use_cache=False).loss.backward()
    assert report.fallbacks == {}, report
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        found = {name: p.grad.clone() for name, p in wrapped.named_parameters()}
    return {name.replace("_fsdp_wrapped_module.", ""): gradient for name, gradient in found.items()}


def sharded(model: Any, ids: Any, first: bool) -> Dict[str, Any]:
    """FSDP by parameters: each is a shard between the calls of its block."""
    import deuteron
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if first:
        deuteron.patch(model, strict=True)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    report = deuteron.patch(model, strict=True)
    found = gradients(model, ids)
    assert report.fallbacks == {}, report
    return {name: gradient.full_tensor() for name, gradient in found.items()}


WAYS = {"ddp": data_parallel, "fsdp": flat_sharded, "fully_shard": sharded}


def stepped(way: str, make: Any, ids: Any) -> Dict[str, Any]:
    """Parameters after some steps of an optimiser on whole parameters, on views of a flat one, or on shards."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = tiny()
    if way == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif way == "fsdp":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    # The gradient of a key's bias is nothing but rounding; beside this `eps` it stays that.
    optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    if way == "fsdp":
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    return {name: p.full_tensor() if way == "fully_shard" else p.detach() for name, p in model.named_parameters()}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        for way, first in itertools.product(WAYS, (True, False)):
            found = WAYS[way](tiny(), tokens().chunk(RANKS)[rank], first)
            if rank == 0:
                torch.save({name: gradient.clone() for name, gradient in found.items()}, f"{folder}/{way}-{first}.pt")
        import deuteron

        for way in WAYS:
            runs = [stepped(way, make, tokens().chunk(RANKS)[rank]) for make in (torch.optim.AdamW, deuteron.optim.AdamW)]
            if rank == 0:
                torch.save([{name: p.clone() for name, p in run.items()} for run in runs], f"{folder}/{way}-steps.pt")
    finally:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Gradients of all ways, by two processes. They take longer to start than to run, so they start once."""
    folder = str(tmp_path_factory.mktemp("gradients"))
    torch.multiprocessing.spawn(work, args=(folder,), nprocs=RANKS)
    return folder


@pytest.mark.parametrize("first", [True, False], ids=["patched-first", "wrapped-first"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(way: str, first: bool, folder: str) -> None:
    model, ids = tiny(), tokens()
    exact = gradients(copy.deepcopy(model).double(), ids)
    single = gradients(model, ids)
    found = torch.load(f"{folder}/{way}-{first}.pt")
    assert set(found) == set(single)
    for name in single:
        # Three times the error of one process; the mean over ranks is a sum and a product more.
        roundings = 4 * torch.finfo(torch.float32).eps * exact[name].abs().max().item()
        allowed = 3 * (single[name] - exact[name]).abs().max().item() + roundings
        error = (found[name] - exact[name]).abs().max().item()
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("way", WAYS)
def test_steps_of_the_optimiser_are_those_of_torchs(way: str, folder: str) -> None:
    theirs, ours = torch.load(f"{folder}/{way}-steps.pt")
    assert set(theirs) == set(ours)
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")
