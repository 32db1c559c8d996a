"""How many parameters the adapters of a rank have: counted from the rules of the matrices that they are next to.

Invariant: the matrices are those that the trainer gives an adapter (`hpcrl.models.lora.matrices.adapted`); of a layer
with experts all are taken to be like the first one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from hpcrl.models.family import Config, Family, Rule
from hpcrl.models.lora.matrices import AdaptedMatrix, adapted
from hpcrl.models.lora.settings import LoraSettings


def matrices_by_name(family: Family, config: Config, settings: LoraSettings) -> dict[tuple[str, ...], AdaptedMatrix]:
    """The matrices with an adapter, by the Hugging Face tensors that they are made of."""
    return _matrices(family.tensors, json.dumps(config), settings)


@lru_cache(4)  # each stage of a pipeline asks for those of the whole model
def _matrices(
    tensors: Callable[[Config], Any], config: str, settings: LoraSettings
) -> dict[tuple[str, ...], AdaptedMatrix]:
    first = [(name, rule) for name, rule in tensors(json.loads(config)) if rule.expert in (None, 0)]
    return {matrix.base.hf: matrix for matrix in adapted(first, settings)}


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
