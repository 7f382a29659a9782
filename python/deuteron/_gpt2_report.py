"""The report of `patch`: what was replaced, what was not, and why."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Dict, List, Tuple


@dataclass
class Report:
    """What `patch` replaced, what it left, and which calls fell back to the original forward.

    It is true if something was replaced and nothing was left.
    """

    # modules that run fused
    replaced: List[str] = field(default_factory=list)
    # modules that do not, each with the reason
    left: List[Tuple[str, str]] = field(default_factory=list)
    # calls of replaced modules that took the original forward, counted by reason; the counts go on
    fallbacks: Dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.replaced) and not self.left

    def __str__(self) -> str:
        fell = sum(self.fallbacks.values())
        lines = [f"{len(self.replaced)} replaced, {len(self.left)} left, {fell} calls fell back"]
        lines += [f"  replaced   {name}" for name in self.replaced]
        lines += [f"  left       {name}: {reason}" for name, reason in self.left]
        lines += [f"  fell back  {count}x {reason}" for reason, count in self.fallbacks.items()]
        return "\n".join(lines)

    def count(self, reason: str) -> None:
        """Counts a call that fell back. The first one per reason is a warning."""
        seen = self.fallbacks.get(reason, 0)
        self.fallbacks[reason] = seen + 1
        if seen == 0:
            message = f"deuteron: a patched module ran its original forward: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


class Unfit(Exception):
    """This call cannot run fused; its text says why."""
