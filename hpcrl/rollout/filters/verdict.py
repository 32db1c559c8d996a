"""What a dynamic filter says of a group.

Invariant: whatever a custom filter returns becomes a `Verdict` or a TypeError; a bare bool, a tensor that holds
one, and any object with such a `keep` (and `reason`, `keep_when_insufficient`) will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REASON = 60  #: characters of a reason that are kept: it becomes the name of a metric


@dataclass(frozen=True)
class Verdict:
    """What a filter says of a group.

    Attributes:
        keep: into the batch.
        reason: why not.
        keep_when_insufficient: into the batch all the same where there are too few.
    """

    keep: bool
    reason: str = "filter"
    keep_when_insufficient: bool = False


def read_verdict(result: Any) -> Verdict:
    """The verdict that a filter returned.

    Raises:
        TypeError: if it is not a verdict.
    """
    if (alone := _truth(result)) is not None:
        return Verdict(alone)
    keep = _truth(getattr(result, "keep", None))
    if keep is None:
        raise TypeError(f"returned {type(result).__name__}, neither a bool nor something with a bool `keep`")
    reason = getattr(result, "reason", None)
    text = "".join(c if c.isalnum() or c in "_.-" else "_" for c in str(reason)[:REASON]) if reason else "filter"
    return Verdict(keep, text, bool(getattr(result, "keep_when_insufficient", False)))


def _truth(value: Any) -> bool | None:
    """Of a bool, or of an array, tensor or number of numpy's without dimensions; None for everything else.

    The filters that slime's guides print return `rewards.std() > 0.0`, a tensor without dimensions.
    """
    if isinstance(value, bool):
        return value
    return bool(value.item()) if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else None
