"""The matrices of an FP8 checkpoint as the numbers that its codes and scales stand for, read one at a time.

    codes [rows, columns] * scale of the block, the row or the matrix, in fp32, rounded to bf16

as DeepSeek's own conversion of its files does.  Such a checkpoint has lost what quantising lost: it is read where the
user asks for that (`hpcrl convert to-torch-dist`), and training never begins from it by itself.

Invariant: what is no FP8 matrix is given as it is; a matrix without scales is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpcrl.errors import DataError
from hpcrl.models.files.fp8 import FP8, Scheme
from hpcrl.models.files.safetensors_files import AGAIN, Entry, SafetensorsDirectory

CODES = "float8_e4m3fn"


def dequantized(codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The bf16 matrix of float8_e4m3fn codes [rows, columns] and their scales, of `Scheme.scale_shape`."""
    scale = scale.float()
    if scheme.strategy == "block":
        rows, columns = codes.shape
        high, wide = scheme.block
        scale = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return (codes.float() * scale).bfloat16()


def widened(names: Mapping[str, Entry], scheme: Scheme, directory: Path) -> dict[str, Entry]:
    """The tensors of a checkpoint as they are given: no scales, and no FP8.

    Raises:
        DataError: names a matrix whose scales are missing, or of another shape.
    """
    found = {}
    scales = set()
    for name, entry in names.items():
        if entry.dtype != CODES:
            continue
        scales.add(scale := scheme.scale_name(name))
        wanted = scheme.scale_shape(entry.shape)
        if scale not in names or names[scale].shape != wanted:
            raise DataError(f"{directory}: {name} is FP8, and there is no {scale} of shape {list(wanted)}", AGAIN)
    for name, entry in names.items():
        if name not in scales:
            found[name] = replace(entry, dtype="bfloat16") if entry.dtype == CODES else entry
    return found


class Dequantized(SafetensorsDirectory):
    """The files of a directory, from which FP8 matrices are read as bf16."""

    def __init__(self, directory: Path, stack: ExitStack, where: dict[str, str], scheme: Scheme) -> None:
        super().__init__(directory, stack, where)
        self.scheme = scheme

    def tensor(self, name: str) -> Any:
        """As it says there, after multiplying with the scales."""
        found = super().tensor(name)
        if found.dtype is not FP8:
            return found
        return dequantized(found, super().tensor(self.scheme.scale_name(name)), self.scheme)
