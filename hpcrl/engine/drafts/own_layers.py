"""The layers that an engine drafts with, as a weight update finds them: what vLLM's drafting model does not share with
the model.

vLLM's models that draft (MiMoMTP, Glm4MoeMTP, DeepSeekMTP, ...) take embedding and output layer from the model itself,
and have the modules of a layer one level deeper than a checkpoint, or under another number.

Invariant: a module that the model has too is the model's alone, neither listed nor loaded twice; each of the others
goes by a name that the checkpoint has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hpcrl.engine.drafts import REFRESHED
from hpcrl.engine.params.layers import Holdings, stock
from hpcrl.models.files.safetensors_files import Entry

_BLOCK = ".mtp_block"  #: the module around what a checkpoint has in the layer itself
_MIMO = re.compile(r"^(model\.mtp_layers\.)(\d+)")  #: which vLLM counts from the model's last layer on


class OwnLayers:
    """The drafting model's own modules; vLLM's functions for reloading take it as they take a model.

    Attributes:
        model_config: vLLM's, of the drafting model.
    """

    def __init__(self, drafter: nn.Module, model: nn.Module, model_config: Any) -> None:
        self.model_config = model_config
        self._drafter = drafter
        self._packed = getattr(model, "packed_modules_mapping", None) or {}
        shared = set(map(id, model.modules()))
        self._named = {path: layer for path, layer in drafter.named_modules() if id(layer) not in shared}

    def modules(self) -> Iterator[nn.Module]:
        return iter(self._named.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each once, as of a module; a router's bias is its experts' too."""
        seen = set[int]()
        for path, layer in self._named.items():
            for name, parameter in layer.named_parameters(path, recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load some of the tensors, which `holdings` names; the parameters that they went to."""
        return set(self._drafter.load_weights(weights) or ())  # type: ignore[operator]

    def holdings(self, names: Mapping[str, Entry]) -> Holdings:
        """What these modules hold.

        Args:
            names: the tensors of the checkpoint; none, if they are not known.

        Raises:
            ValueError: for a parameter under a name that the checkpoint does not have, which no update could bring.
        """
        layers = int(self._drafter.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]
        found = stock({_in_checkpoint(path, layers): layer for path, layer in self._named.items()}, self._packed, names)
        if names and (strange := sorted(found.pieces.keys() - names.keys())):
            raise ValueError(f"vLLM drafts with {strange[0]}, which the checkpoint does not have")
        return found


def own_layers(worker: Any) -> OwnLayers | None:
    """Those of a vLLM worker with a loaded model, if updates are to bring them."""
    if os.environ.get(REFRESHED) != "1":
        return None
    if (drafter := worker.get_draft_model()) is None:
        raise ValueError("the run's updates bring drafting layers, but this engine drafts with none")
    return OwnLayers(drafter, worker.model_runner.get_model(), worker.vllm_config.speculative_config.draft_model_config)


def _in_checkpoint(path: str, layers: int) -> str:
    """A module's path as the checkpoint has it, of a model with so many layers."""
    return _MIMO.sub(lambda found: f"{found[1]}{int(found[2]) - layers}", path.replace(_BLOCK, ""))
