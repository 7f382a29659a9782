"""Examples of the pages in `docs/python` do what they say."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "python").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_a_page_run(page: Path) -> None:
    text = page.read_text()
    if "import torch" in text:
        pytest.importorskip("torch")
    if "from transformers" in text:
        pytest.importorskip("transformers")
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried > 0 and failed == 0
