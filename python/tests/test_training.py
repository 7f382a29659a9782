"""Training a patched GPT-2: the same losses as without, and the same bits after a restart."""

from __future__ import annotations

import io
from typing import Any, Iterator, List, Tuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import deuteron  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

VOCABULARY, BATCH, LENGTH = 256, 4, 32


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def start(dropout: float = 0.0) -> Tuple[Any, Any]:
    """A model to train, and its optimizer."""
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=64)
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **sizes))
    return model.train(), torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: Any, optimizer: Any, steps: range) -> List[float]:
    """The loss of each step, on texts that can be learnt: each token is a little after the one before."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 7, (BATCH, LENGTH), generator=generator).cumsum(1) % VOCABULARY
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def furthest(a: List[float], b: List[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b))


def test_losses_are_those_of_the_model() -> None:
    """Apart by at most twice what torch is from itself on another number of threads."""
    runs = []
    for threads, patching in [(1, False), (2, False), (2, True)]:
        torch.set_num_threads(threads)
        model, optimizer = start()
        if patching:
            report = deuteron.patch(model, strict=True)
        runs.append(train(model, optimizer, range(50)))
    assert report.fallbacks == {}
    one, two, ours = runs
    assert ours[-1] < 0.8 * ours[0]
    # A loss is an f32 at the end of a sum of such: two right ones are often two units of the last place apart. Torch
    # may be lucky with its threads, so four units are always allowed.
    unit = torch.finfo(torch.float32).eps * 2 ** int(torch.tensor(two[0]).log2().floor())
    assert furthest(two, ours) <= 2 * furthest(one, two) + 4 * unit


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_resumed_training_has_the_same_bits(dropout: float) -> None:
    model, optimizer = start(dropout)
    deuteron.patch(model, strict=True)
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, file)
    expected = train(model, optimizer, range(4, 8))
    file.seek(0)
    stored = torch.load(file)
    other, optimizer = start(dropout)
    other.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    deuteron.patch(other, strict=True)
    torch.set_rng_state(stored["rng"])
    assert train(other, optimizer, range(4, 8)) == expected
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values()):
        assert torch.equal(a, b), name


def test_training_is_the_same_on_any_number_of_threads() -> None:
    """What torch itself computes aside: the blocks alone."""
    gradients = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        model, _ = start(0.1)
        deuteron.patch(model, strict=True)
        torch.manual_seed(3)
        x = torch.randn(BATCH, LENGTH, 64, requires_grad=True)
        y = model.transformer.h[0](x)
        y.backward(torch.ones_like(y))
        parameters = model.transformer.h[0].parameters()
        gradients.append([y.detach(), x.grad, *(p.grad for p in parameters)])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
