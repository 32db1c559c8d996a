"""Further sets of weights inside a checkpoint: a reference model that has moved, an old actor.

    DIR/iter_0000020/reference/     a torch_dist checkpoint of weights alone

Invariant: written before the checkpoint that holds it gets its name, in the dtype that the run keeps it in; read into
any layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpcrl.errors import HpcrlError
from hpcrl.trainer.checkpoint import save_load
from hpcrl.trainer.megatron.model import Policy


def save_set(policy: Policy, values: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write a set of weights (names of `host_weights.weights`) into a new directory; collective."""
    save_load.make_directory(directory, policy.ranks)
    save_load.write(_request(policy, values), directory)


def load_set(policy: Policy, values: Mapping[str, torch.Tensor], directory: Path) -> dict[str, torch.Tensor]:
    """The set of weights in `directory`, cut as `values` are, which may be overwritten; collective.  DataError as
    `load_weights`."""
    stored = save_load.open_whole(directory, policy.ranks)
    state = save_load.read(_request(policy, values), stored, policy)
    return {name: state[model][key] for name, (model, key) in _places(policy, values).items()}


def _request(policy: Policy, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The policy's own weights in a checkpoint, with other numbers in them."""
    request = save_load.weights(policy)
    for name, (model, key) in _places(policy, values).items():
        if key not in request[model]:
            raise HpcrlError(f"a checkpoint of this model does not keep {key}, a reference or old actor needs it")
        part = request[model][key]
        typed = {"dtype": values[name].dtype} if hasattr(part, "dtype") else {}
        request[model][key] = replace(part, data=values[name], **typed)
    return request


def _places(policy: Policy, values: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, str]]:
    """Name of `host_weights.weights` -> (part of the checkpoint, key in it)."""
    many = len(policy.modules) > 1
    split = {name: name.split(".", 1) for name in values}
    return {name: (f"model{chunk if many else ''}", key) for name, (chunk, key) in split.items()}
