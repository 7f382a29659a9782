"""The command: `python -m deuteron`."""

from __future__ import annotations

import sys

from ._native import main


def run() -> None:
    """Runs the command with the words of this process."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
