"""A sample as bytes, in files and to other processes; see `hpcrl.sample` for its columns and fields."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hpcrl.sample import FIELDS, Sample
from hpcrl.utils.sample_parts import COLUMNS

_FIELDS = [*FIELDS.items(), ("attributes", dict[str, Any])]
_PackedFields: Any = msgspec.defstruct("_PackedFields", _FIELDS, module=__name__)


class PackedSample(msgspec.Struct):
    """A sample as msgspec writes it.

    Attributes:
        columns: bytes of those that it has, or none of them.
        shapes: of an entry, of those where it has further dimensions.
    """

    fields: _PackedFields
    columns: dict[str, bytes]
    shapes: dict[str, list[int]]


def pack(sample: Sample, columns: bool = True) -> PackedSample:
    """A sample as it is written.

    Args:
        columns: whether those are too that have an entry for each token.
    """
    found, shapes = {}, {}
    for name, kind in COLUMNS.items() if columns else ():
        if sample.has(name):
            column = np.ascontiguousarray(sample.array(name), kind.dtype)
            found[name] = column.tobytes()
            if kind.dims:
                shapes[name] = list(column.shape[1:])
    if isinstance(vars(sample).get("_reward"), dict):
        sample.fold_reward()
    known = vars(sample) | {"reward": vars(sample).get("_reward"), "attributes": sample.attributes()}
    return PackedSample(_PackedFields(*(known[name] for name, _ in _FIELDS)), found, shapes)


def unpack(packed: PackedSample) -> Sample:
    """The sample again; its columns are not set where `pack` was asked for none.

    Raises:
        ValueError, KeyError, TypeError: if it is none.
    """
    columns = {name: np.frombuffer(data, COLUMNS[name].dtype).copy() for name, data in packed.columns.items()}
    for name, shape in packed.shapes.items():
        columns[name] = columns[name].reshape(-1, *shape)
    fields = msgspec.structs.asdict(packed.fields)
    attributes = fields.pop("attributes")
    sample = Sample(**fields, **columns)
    for name, value in attributes.items():
        setattr(sample, name, value)
    return sample
