"""Files in which one tensor holds a matrix of all experts of a layer, by the names that single experts have elsewhere.

    X.experts.gate_up_proj [experts, 2 rows, columns]  ->  X.experts.E.gate_proj.weight, X.experts.E.up_proj.weight
    X.experts.down_proj    [experts, rows, columns]    ->  X.experts.E.down_proj.weight

So published Qwen3.5 models with experts have them (`Family.stacked`).  Trainer and engines know the single ones alone.

Invariant: what is read of a stack is the part of it that belongs to the expert, bit for bit, and no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hpcrl.errors import DataError
from hpcrl.models.files.safetensors_files import AGAIN, Entry, SafetensorsDirectory

#: what a stack holds of each expert, one below the other
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def is_stack(name: str) -> bool:
    """Whether a tensor of this name holds a matrix of all experts of a layer."""
    return _STACK.fullmatch(name) is not None


def single(names: Mapping[str, Entry]) -> dict[str, Entry]:
    """The tensors of files as if each expert had its own, in their order.

    Raises:
        DataError: names a stack that cannot be cut.
    """
    found: dict[str, Entry] = {}
    for name, entry in names.items():
        if stack := _STACK.fullmatch(name):
            parts = STACKS[stack[2]]
            if len(entry.shape) != 3 or entry.shape[1] % len(parts):
                raise DataError(
                    f"{name} of {entry.file} is {list(entry.shape)}, expected [experts, rows, columns]", AGAIN
                )
            shape = (entry.shape[1] // len(parts), entry.shape[2])
            for expert in range(entry.shape[0]):
                for part in parts:
                    found[f"{stack[1]}.{expert}.{part}.weight"] = Entry(entry.dtype, shape, entry.file)
        else:
            found[name] = entry
    return found


def stack_of(name: str) -> tuple[str, int, int, int] | None:
    """(the stack, number of the expert, which of so many parts of it) that a single expert's tensor is in, by name."""
    match = _SINGLE.fullmatch(name)
    if match is None:
        return None
    part = f"{match[3]}_proj"
    kind, parts = next((kind, parts) for kind, parts in STACKS.items() if part in parts)
    return f"{match[1]}.{kind}", int(match[2]), parts.index(part), len(parts)


def stacks(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(a tensor of the files, the single ones that it holds, in their order) of all names, in order; of one that is in
    no stack, itself."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for name in names:
        place = stack_of(name)
        found.setdefault(place[0] if place else name, []).append((place[1], place[2], name) if place else (0, 0, name))
    for stack, singles in found.items():
        yield stack, [name for *_, name in sorted(singles)]


class ExpertsApart(SafetensorsDirectory):
    """The files of a directory, from which single experts are read out of their stacks."""

    def tensor(self, name: str) -> Any:
        """As it says there; of a single expert its part alone is read."""
        if (place := stack_of(name)) is None:
            return super().tensor(name)
        stack, expert, part, parts = place

        def cut(file: Any) -> torch.Tensor:
            whole = file.get_slice(stack)
            rows = whole.get_shape()[1] // parts
            return whole[expert, part * rows : (part + 1) * rows]

        return self._read_with(name, cut)


def put(stack: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    """Write a single expert's tensor to its place in the stack, which `stack_of` tells by its name.

    Args:
        stack: [experts, rows, columns].
    """
    place = stack_of(name)
    assert place is not None
    _, expert, part, parts = place
    rows = stack.shape[1] // parts
    stack[expert, part * rows : (part + 1) * rows] = tensor
