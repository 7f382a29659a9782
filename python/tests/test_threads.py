"""How many threads a call takes, and whose they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import deuteron

FOLDER = Path(__file__).resolve().parent.parent


def run(code: str, **environment: str) -> str:
    """What a program prints that imports the package in a process of its own."""
    # A package that was installed comes first, the folder is for runs from the sources.
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(FOLDER)]), **environment}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", env=variables, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


THREADS_OF_A_CALL = """
import os, numpy, deuteron
{before}
x = numpy.ones((4096, 512), "float32")
deuteron.softmax(x)
names = [open(f"/proc/self/task/{{task}}/comm").read() for task in os.listdir("/proc/self/task")]
print(deuteron.get_num_threads(), sum(name.startswith("deuteron-") for name in names))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    "before, variable, active, spawned",
    [
        ("deuteron.set_num_threads(1)", "", 1, 0),
        ("deuteron.set_num_threads(2)", "", 2, 1),
        ("", "1", 1, 0),
        ("", "2,1", 2, 1),
        ("deuteron.set_num_threads(2)", "1", 2, 1),
    ],
)
def test_a_limit_holds(before: str, variable: str, active: int, spawned: int) -> None:
    found = run(THREADS_OF_A_CALL.format(before=before), OMP_NUM_THREADS=variable)
    assert found == f"{active} {spawned}"


@pytest.mark.parametrize("variable", ["", "0", "many", "-3", "1000000"])
def test_a_variable_that_names_no_number_of_cores_is_ignored(variable: str) -> None:
    cores = int(run("import deuteron; print(deuteron.get_num_threads())", OMP_NUM_THREADS=""))
    assert int(run("import deuteron; print(deuteron.get_num_threads())", OMP_NUM_THREADS=variable)) == cores


@pytest.mark.parametrize("threads", [0, -1, 10**6, 2**70])
def test_what_is_no_number_of_threads_is_refused(threads: int) -> None:
    before = deuteron.get_num_threads()
    with pytest.raises((ValueError, OverflowError)):
        deuteron.set_num_threads(threads)
    assert deuteron.get_num_threads() == before


def test_any_number_of_threads_gives_the_same_bits() -> None:
    x = np.random.default_rng(11).standard_normal((1031, 257), dtype="float32")
    cores = deuteron.get_num_threads()
    expected = deuteron.softmax(x).tobytes()
    try:
        for threads in range(1, cores + 1):
            deuteron.set_num_threads(threads)
            assert deuteron.get_num_threads() == threads
            assert deuteron.softmax(x).tobytes() == expected
    finally:
        deuteron.set_num_threads(cores)


BESIDE_TORCH = """
import os, torch, deuteron
x = torch.randn(4096, 512)
def own(): return sum(open(f"/proc/self/task/{task}/comm").read().startswith("deuteron-") for task in os.listdir("/proc/self/task"))
results, active = [], []
for limit, count in [(2, 2), (2, 1), (1, 2), (2, 2)]:
    deuteron.set_num_threads(limit)
    torch.set_num_threads(count)
    results.append(deuteron.softmax(x))
    active.append(deuteron.get_num_threads())
print(active, all(torch.equal(result, results[0]) for result in results), own())
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_calls_run_on_the_threads_of_torch_and_keep_to_both_limits() -> None:
    pytest.importorskip("torch")
    assert run(BESIDE_TORCH) == "[2, 1, 1, 2] True 0", "no threads of our own beside those of torch"


FORKED = """
import os, torch, deuteron
x = torch.randn(4096, 512)
# Comparisons by bytes: a parallel region of torch in a forked process would wait for threads of its parent.
def run(): return deuteron.softmax(x).numpy().tobytes()
def own(): return sum(open(f"/proc/self/task/{task}/comm").read().startswith("deuteron-") for task in os.listdir("/proc/self/task"))
expected = run()
child = os.fork()
if child == 0:
    right = run() == expected and own() == 1
    torch.set_num_threads(1)
    os._exit(0 if right and deuteron.get_num_threads() == 1 and run() == expected else 1)
print(os.waitpid(child, 0)[1], run() == expected, own())
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_a_forked_process_has_threads_of_its_own_and_keeps_to_the_setting_of_torch() -> None:
    pytest.importorskip("torch")
    assert run(FORKED, OMP_NUM_THREADS="2") == "0 True 0"
