"""Programs of other texts and operands of other types: each answers, or is refused with an exception that callers expect.

A longer run: `python tests/test_fuzz.py PROGRAMS SEED`. A failure names its seed.
"""

from __future__ import annotations

import random
import re
import sys
from typing import Any, List, Tuple

import numpy as np

from deuteron._native import Program

#: Texts to begin with: ops with their attributes, graphs, and the states that these have.
TEXTS: Tuple[Tuple[str, Tuple[str, ...]], ...] = (
    ("norm_act norm=layer act=gelu eps=1e-05", ()),
    ("bias_act act=gelu", ()),
    ("add_norm norm=rms eps=1e-05", ()),
    ("softmax scale=0.5", ()),
    ("attention mask=causal", ()),
    ("cross_entropy", ()),
    ("x = input f32[4,8] ; y, mean, rstd = layer_norm x w[8] b[8] ; z = gelu y ; out z", ()),
    ("q = input f32[2,4,16,8] ; a = attention q q q mask=causal ; out a", ()),
    ("x = input f32[4,8] ; i = row_argmax x ; t = input f32[8,3] ; y = gather t i ; out y", ()),
    ("x = input f16[3,33] ; s = row_sum x ; y = softmax x ; out y s", ()),
    (
        "cache = input f32[2,3,8,4] ; rows = input f32[2,3,1,4] ; at = input i32[2] ;"
        " kept = append cache rows at batch=0 ; out kept",
        ("cache",),
    ),
)

NUMBERS = ("0", "1", "2", "3", "7", "33", "129", "-1", "0.5", "1e30", "nan", "2147483648", "18446744073709551615")
WORDS = ("f16", "bf16", "i32", "i8", "out", ";", "=", "[", "]", "mask=causal", "act=silu", "norm=rms", "\0", "é")

#: Names of dtypes as programs have them, and NumPy's; it has no `bf16`.
DTYPES = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i8": np.int8, "f64": np.float64, "bool": np.bool_}

NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}

#: What a refusal may be. A panic is none of these.
REFUSALS = (ValueError, TypeError, IndexError, OverflowError, MemoryError, RuntimeError, NotImplementedError)

#: Programs that are run have no larger number in their text, so that no result is too large for a test.
LARGEST = 200


def changed(text: str, draw: random.Random) -> str:
    """The text with another number, another word or other characters."""
    places = [match.span() for match in re.finditer(r"\b\d+\b", text)]
    kind = draw.randrange(4)
    if kind < 2 and places:
        start, end = draw.choice(places)
        return text[:start] + draw.choice(NUMBERS) + text[end:]
    if kind == 2:
        start, end = draw.choice([match.span() for match in re.finditer(r"\S+", text)])
        return text[:start] + draw.choice(WORDS) + text[end:]
    at = draw.randrange(len(text))
    inserted = draw.choice(["", chr(draw.randrange(256)), text[at : at + 7] * 2])
    return text[:at] + inserted + text[at + draw.randrange(3) :]


def operand(name: str, program: Program, draw: random.Random) -> Any:
    """An array for an operand: of the type that the text asks for, or of some other, or no array at all."""
    asked = re.search(rf"\b{re.escape(name)} = input (\w+)\[([\d,]*)\]", program.text)
    shape = [int(size) for size in asked.group(2).split(",") if size] if asked else [4, 8][draw.randrange(2) :]
    dtype = asked.group(1) if asked and asked.group(1) in DTYPES else "f32"
    if draw.random() < 0.1:
        shape[draw.randrange(len(shape)) :] = [draw.choice([0, 1, 3, 8])] if shape else [1]
    if draw.random() < 0.1:
        dtype = draw.choice(list(DTYPES))
    array = np.ones(shape, DTYPES[dtype])
    others: List[Any] = [None, 3.5, [1.0, 2.0], array.T, array[..., ::-1], array.view(), np.array("text"), object()]
    return draw.choice(others) if draw.random() < 0.1 else array


def attempt(seed: int) -> bool:
    """Whether the program of a seed ran."""
    draw = random.Random(seed)
    text, states = draw.choice(TEXTS)
    for _ in range(draw.randrange(4)):
        text = changed(text, draw) or text
    try:
        if draw.random() < 0.1:
            states = draw.choice([("cache",), ("nothing",), ("x", "x"), ()])
        program = Program(text, states=list(states))
        numbers = [int(word) for word in re.findall(r"\d+", program.text)]
        if max(numbers, default=0) > LARGEST:
            return False
        operands = [operand(name, program, draw) for name in program.operands]
        if all(isinstance(array, np.ndarray) for array in operands):
            program.types([(NAMES.get(array.dtype, "f32"), array.shape) for array in operands])
        results = program.forward(operands)
    except REFUSALS as refusal:
        assert "panicked" not in str(refusal), f"seed {seed}: {refusal}"
        assert str(refusal), f"seed {seed}: {type(refusal)} says nothing"
        return False
    except BaseException as problem:
        raise AssertionError(f"seed {seed}: {text!r}: {type(problem).__name__}") from problem
    # What is written in place of a state is handed to nobody.
    assert len(results) == len(program.outputs) - len(states), f"seed {seed}: {text!r}"
    return True


def run(programs: int, first: int) -> int:
    """How many of so many programs ran."""
    return sum(attempt(seed) for seed in range(first, first + programs))


def test_programs_answer_or_are_refused() -> None:
    ran = run(2000, 0)
    assert 200 < ran < 1900, f"{ran} ran: neither all nor none should"


if __name__ == "__main__":
    count, begin = int(sys.argv[1]), int(sys.argv[2])
    print(f"{count} programs from seed {begin}: {run(count, begin)} ran, the others were refused")
