"""A model that `deuteron train` wrote, read by the transformers library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import pytest

import deuteron

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Where the package that is tested lies: of a wheel that is installed, or of a checkout.
PACKAGES = Path(deuteron.__file__).resolve().parent.parent
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


def command(*words: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    ran = subprocess.run(
        [sys.executable, "-m", "deuteron", *words], capture_output=True, encoding="utf-8", env=environment, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def trained(folder: Path, *words: str) -> Any:
    text = folder / "text.txt"
    text.write_text(TEXT)
    sizes = "--layers 1 --heads 2 --width 16 --context 16 --batch 2 --steps 30 --learning-rate 0.01 --device cpu --json"
    return command("train", str(text), "--out", str(folder / "run"), *sizes.split(), *words)


@pytest.mark.parametrize("words", [[], ["--precision", "bf16", "--dropout", "0.1"]], ids=["f32", "bf16"])
def test_transformers_reads_a_trained_model(tmp_path: Path, words: List[str]) -> None:
    checkpoint = trained(tmp_path, *words)["checkpoint"]
    model, loading = transformers.GPT2LMHeadModel.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    prompt = "the quick br\u00e9wn\n"
    ids = tokenizer(prompt)["input_ids"]
    assert ids == list(prompt.encode()) and tokenizer.decode(ids) == prompt
    assert tokenizer.eos_token_id == model.config.eos_token_id == 256

    prompt = "the qui"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    # Greedy by hand: no setting of the library's own comes between.
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    ours = command("generate", prompt, "--model", checkpoint, "--max-tokens", "8", "--device", "cpu", "--json")
    assert ours["texts"][0]["tokens"] == ids[0, len(prompt) :].tolist()


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    """One more step from the checkpoint: its loss is of the weights that transformers reads."""
    checkpoint = trained(tmp_path)["checkpoint"]
    # One sequence alone, so that there is one place to draw it from.
    tokens = torch.tensor([list(TEXT[:17].encode())])
    (tmp_path / "one.bin").write_bytes(b"".join(int(token).to_bytes(2, "little") for token in tokens[0]))
    out = str(tmp_path / "one")
    words = "--steps 1 --batch 1 --validation-share 0 --device cpu --json"
    report = command("train", str(tmp_path / "one.bin"), "--model", checkpoint, "--out", out, *words.split())
    model = transformers.GPT2LMHeadModel.from_pretrained(checkpoint).double()
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item()
    # Some ten roundings of f32 on the way.
    assert abs(report["loss"] - loss) <= 16 * torch.finfo(torch.float32).eps * loss


BOX = Path(__file__).resolve().parents[2] / "crates" / "gpt2" / "box"


def test_transformers_computes_the_same_from_the_model_in_the_box(tmp_path: Path) -> None:
    """Greedy tokens of the command without a model's name, and the perplexity of a text."""
    model = transformers.GPT2LMHeadModel.from_pretrained(BOX).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(BOX)
    expected = json.loads((BOX / "expected.json").read_text(encoding="utf-8"))
    prompt = expected["cases"][0]["text"]
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    text = (BOX / "held-out.txt").read_text(encoding="utf-8")[5000:8000]
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][0]
    total = 0.0
    with torch.no_grad():
        for _ in range(16):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        for at in range(0, len(tokens) - 1, 256):
            window = tokens[at : at + 257]
            logits = model(window[None, :-1]).logits[0]
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    ours = command("generate", prompt, "--max-tokens", "16", "--device", "cpu", "--json")
    assert ours["model"] == "box" and ours["texts"][0]["tokens"] == ids[0, start:].tolist()

    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    words = ("perplexity", str(tmp_path / "text.txt"), "--device", "cpu", "--json")
    loss = total / (len(tokens) - 1)
    assert abs(command(*words)["loss"] - loss) < 1e-4
    for weights, allowed in [("bf16", 0.01), ("int8", 0.02)]:
        assert abs(command(*words, "--weights", weights)["loss"] - loss) < allowed, weights
