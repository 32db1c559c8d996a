"""What a dynamic filter says of a group.

Invariant: whatever an own filter returns becomes a `Verdict` or a TypeError; a bare bool, and any object with `keep` (and `reason`,
`keep_when_insufficient`), will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

REASON = 60  #: characters of a reason that are kept: it becomes the name of a metric


@dataclass(frozen=True)
class Verdict:
    """keep: into the batch; reason: why not; keep_when_insufficient: into the batch all the same where there are too few."""

    keep: bool
    reason: str = "filter"
    keep_when_insufficient: bool = False


def read_verdict(result: Any) -> Verdict:
    """The verdict that a filter returned.  TypeError if it is none."""
    if isinstance(result, bool | np.bool_):
        return Verdict(bool(result))
    keep = getattr(result, "keep", None)
    if not isinstance(keep, bool | np.bool_):
        raise TypeError(f"returned {type(result).__name__}, neither a bool nor something with a bool `keep`")
    reason = getattr(result, "reason", None)
    text = "".join(c if c.isalnum() or c in "_.-" else "_" for c in str(reason)[:REASON]) if reason else "filter"
    return Verdict(bool(keep), text, bool(getattr(result, "keep_when_insufficient", False)))
