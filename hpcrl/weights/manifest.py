"""What a worker of an engine says of itself before the first update: its manifest, plain values
(`WorkerExtension.hpcrl_manifest`).

Invariant: there is one answer to which part of a tensor a worker holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def span(worker: Mapping[str, Any], name: str, shape: Sequence[int]) -> tuple[Any, Any]:
    """(rows, columns or None for all) of a tensor of that shape which a worker needs; all of it where only its loader
    knows."""
    held = worker["tensors"].get(name) or worker.get("cuts", {}).get(name)
    if held is not None:
        return held["rows"], held["columns"]
    return ([[0, shape[0]]] if shape else []), None
