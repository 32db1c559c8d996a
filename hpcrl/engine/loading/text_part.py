"""What an engine holds of the text part of a model that also sees images, by the names of its files.

Such files have it under `model.language_model.`, vLLM's class for the text part alone under `model.`; its loader takes
the names of the files (`hf_to_vllm_mapper`).  Of experts that files have in one tensor updates bring each by itself, so
these are the names that count.

Invariant: of another model the holdings are those of `held.layers`, as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from hpcrl.engine.params.layers import Holdings, holdings
from hpcrl.models.files.safetensors_files import Entry
from hpcrl.models.files.stacked_experts import single

OURS = "model."
FILES = "model.language_model."


def named_as_in_files(model: nn.Module, names: Mapping[str, Entry]) -> Holdings:
    """What a loaded model holds.

    Args:
        names: the tensors of its checkpoint.

    Raises:
        DataError: names a stack of experts that cannot be cut.
    """
    names = single(names)  # else experts that cannot be shown would be wanted by a name that nothing has
    if hasattr(model, "language_model") or not any(name.startswith(FILES) for name in names):
        return holdings(model, names)
    found = holdings(model, {name.replace(FILES, OURS, 1): entry for name, entry in names.items()})
    pieces = {
        _in_files(name): replace(piece, same_as=piece.same_as and _in_files(piece.same_as))
        for name, piece in found.pieces.items()
    }
    return Holdings(
        pieces,
        tuple(map(_in_files, found.opaque)),
        {_in_files(name): entry for name, entry in found.unseen.items()},
        {_in_files(name): cut for name, cut in found.cuts.items()},
    )


def _in_files(name: str) -> str:
    return FILES + name.removeprefix(OURS) if name.startswith(OURS) else name
