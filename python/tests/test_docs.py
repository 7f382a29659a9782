"""Examples of the README, of the pages in `docs/python` and of those in the guide do what they say."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide" / "src"
PAGES = sorted((ROOT / "docs" / "python").glob("*.md"))
PAGES += sorted(page for page in GUIDE.glob("*.md") if "```python\n" in page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_a_page_run(page: Path) -> None:
    text = page.read_text()
    if "import torch" in text:
        pytest.importorskip("torch")
    if "from transformers" in text:
        pytest.importorskip("transformers")
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried > 0 and failed == 0


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    x, r, w, b = torch.randn(5, 8), torch.randn(5, 8), torch.rand(8), torch.randn(8)
    names = {
        "x": x, "r": r, "w": w, "b": b,
        "model": transformers.GPT2LMHeadModel(config).eval(), "tokens": torch.tensor([[1, 2, 3]]),
    }
    [example] = (ROOT / "README.md").read_text().split("```python\n")[1:]
    exec(example.split("```")[0], names)
    torch.testing.assert_close(names["y"], torch.nn.functional.layer_norm(x + r, (8,), w, b))
    torch.testing.assert_close(names["s"], x + r)
    assert len(names["report"].replaced) > 0
    gated = torch.nn.functional.rms_norm(x, (8,), w, 1e-5) * torch.sigmoid(r)
    torch.testing.assert_close(names["gated"](x, r, w), gated)
    assert "h200" in capsys.readouterr().out
