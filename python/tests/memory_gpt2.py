"""Peak memory of a GPT-2 of Hugging Face over random lengths, patched and not, in training and inference.

    python python/tests/memory_gpt2.py [--device cpu|cuda] [--steps N] [--seed N] [--out FILE] [--commit HASH]

Each of the four runs is a process of its own: 2 layers, batches of tokens whose length is drawn anew at each step, a forward without gradients or a step
with `AdamW`. The peak is that of the process's resident memory on a CPU, and that of torch's allocator plus our workspaces on a GPU. A patched run may
take 1.2 times the peak of the other one, plus the workspace that all programs share (`deuteron.memory_stats`). Exit code 0: both do; 1: one does not.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import torch

LIMIT = 1.2
MODES = ("inference", "training")
HEAD = ["device", "mode", "steps", "lengths", "batch", "width", "vocabulary", "threads", "before_bytes", "unpatched_bytes"]
HEAD += ["patched_bytes", "workspace_bytes", "programs", "share", "seconds_unpatched", "seconds_patched", "torch", "commit", "date"]


def parsed(words: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--out", type=Path, help="a file of rows to append to")
    parser.add_argument("--commit", help="of the rows [default: that of the folder]")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def resident(field: str) -> int:
    """Bytes of this process in memory: `VmRSS` now, `VmHWM` at most so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def run(arguments: argparse.Namespace, mode: str, patched: bool) -> Dict[str, Any]:
    """All steps in this process, and what they took."""
    import transformers

    import deuteron

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    config = transformers.GPT2Config(
        vocab_size=arguments.vocabulary, n_positions=arguments.longest, n_embd=arguments.width, n_layer=2, n_head=arguments.width // 64
    )
    model = transformers.GPT2LMHeadModel(config).to(arguments.device)
    model = model.train() if mode == "training" else model.eval()
    report = deuteron.patch(model, strict=True) if patched else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    is_cuda = arguments.device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        # The most so far is forgotten: loading modules is no part of it.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = torch.cuda.memory_allocated() if is_cuda else resident("VmRSS")
    lengths = random.Random(arguments.seed)
    began = time.monotonic()
    for _ in range(arguments.steps):
        ids = torch.randint(0, arguments.vocabulary, (arguments.batch, lengths.randint(1, arguments.longest)), device=arguments.device)
        if mode == "inference":
            with torch.no_grad():
                model(ids)
            continue
        # A sequence of one token has no label to learn.
        loss = model(ids, labels=ids).loss if ids.shape[1] > 1 else model(ids).logits.float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if is_cuda:
        torch.cuda.synchronize()
    stats = deuteron.memory_stats().get("cuda:0" if is_cuda else "cpu", dict(workspace_bytes=0, programs=0))
    assert report is None or not report.fallbacks, report.fallbacks
    peak = torch.cuda.max_memory_allocated() + stats["workspace_bytes"] if is_cuda else resident("VmHWM")
    return dict(before=before, peak=peak, seconds=time.monotonic() - began, **stats)


def apart(arguments: argparse.Namespace, mode: str, patched: bool) -> Dict[str, Any]:
    """The same in a process of its own."""
    words = [sys.executable, __file__, "--run", mode, "patched" if patched else "unpatched"]
    for name in ("device", "steps", "longest", "batch", "width", "vocabulary", "threads", "seed"):
        words += [f"--{name}", str(getattr(arguments, name))]
    found: Dict[str, Any] = json.loads(subprocess.run(words, check=True, capture_output=True, encoding="utf-8").stdout.splitlines()[-1])
    return found


def measured(arguments: argparse.Namespace, mode: str) -> Dict[str, Any]:
    """A row, and whether it is within the limit."""
    other, mine = (apart(arguments, mode, patched) for patched in (False, True))
    limit = LIMIT * other["peak"] + mine["workspace_bytes"]
    return dict(
        device=arguments.device, mode=mode, steps=arguments.steps, lengths=f"1-{arguments.longest}", batch=arguments.batch,
        width=arguments.width, vocabulary=arguments.vocabulary, threads=arguments.threads, before_bytes=mine["before"],
        unpatched_bytes=other["peak"], patched_bytes=mine["peak"], workspace_bytes=mine["workspace_bytes"], programs=mine["programs"],
        share=round(mine["peak"] / limit, 3), seconds_unpatched=round(other["seconds"], 1), seconds_patched=round(mine["seconds"], 1),
        torch=torch.__version__,
    )


def main() -> int:
    arguments = parsed()
    if arguments.run is not None:
        mode, kind = arguments.run
        print(json.dumps(run(arguments, mode, kind == "patched")))
        return 0
    rows: List[Dict[str, Any]] = []
    for mode in arguments.modes:
        row = measured(arguments, mode)
        rows.append(row)
        print(
            f"{row['device']} {mode}: {row['patched_bytes'] / 1e6:.0f} MB patched, {row['unpatched_bytes'] / 1e6:.0f} MB not, "
            f"{row['workspace_bytes'] / 1e6:.0f} MB of workspace, {row['programs']} programs: {row['share']} of the limit; "
            f"{row['seconds_patched']} s, not patched {row['seconds_unpatched']} s",
            flush=True,
        )
    if arguments.out:
        words = ["git", "rev-parse", "--short", "HEAD"]
        commit = arguments.commit or subprocess.run(words, capture_output=True, encoding="utf-8").stdout.strip()
        new = not arguments.out.exists()
        with arguments.out.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, HEAD, lineterminator="\n")
            if new:
                writer.writeheader()
            for row in rows:
                writer.writerow({**row, "commit": commit, "date": datetime.date.today().isoformat()})
    return 1 if any(row["share"] > 1 for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
