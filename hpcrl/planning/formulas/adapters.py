"""How many parameters the adapters of a rank have: counted from the rules of the matrices that they are next to.

Invariant: the matrices are those that the trainer gives an adapter (`hpcrl.models.lora.matrices.adapted`); of a layer
with experts all are taken to be like the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from hpcrl.models.family import Config, Family, Rule
from hpcrl.models.lora.matrices import AdaptedMatrix, adapted
from hpcrl.models.lora.settings import LoraSettings

_LAST = 4  #: models, and settings of them, whose matrices are kept


def matrices_by_name(family: Family, config: Config, settings: LoraSettings) -> dict[tuple[str, ...], AdaptedMatrix]:
    """The matrices with an adapter, by the Hugging Face tensors that they are made of."""
    return _matrices(_ByIdentity(family), _ByIdentity(config), settings)


def elements(matrix: AdaptedMatrix, shape: tuple[int, ...]) -> int:
    """Of A and B next to a rank's part of a matrix, which has this shape."""
    rows, columns = shape
    return matrix.rank * (len(matrix.inputs) * columns + rows)


def of_layer(
    rules: Iterable[Rule], layer: int, known: Mapping[tuple[str, ...], AdaptedMatrix]
) -> list[tuple[Rule, AdaptedMatrix]]:
    """The rules of a layer whose matrix has an adapter, with what it is like."""
    found = []
    for rule in rules:
        expert = 0 if "{expert}" in rule.megatron else None
        if (matrix := known.get(rule.filled(layer, expert).hf)) is not None:
            found.append((rule, matrix))
    return found


class _ByIdentity:
    """Something that what is made of it can be kept for."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@lru_cache(_LAST)
def _matrices(family: _ByIdentity, config: _ByIdentity, settings: LoraSettings) -> dict[tuple[str, ...], AdaptedMatrix]:
    return {matrix.base.hf: matrix for matrix in adapted(_tensors(family, config), settings)}


@lru_cache(_LAST)
def _tensors(family: _ByIdentity, config: _ByIdentity) -> list[tuple[str, Rule]]:
    """Of a model with its first expert alone."""
    return [(name, rule) for name, rule in family.value.tensors(config.value) if rule.expert in (None, 0)]
