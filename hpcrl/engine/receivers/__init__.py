"""The engines' ends of our own ways of weight transfer: one file each, with the name of its other end in
weights/transports/.

vLLM keeps a table of weight-transfer backends; `register_receivers` adds ours to it, under the names that the trainer's
ends give (`BACKEND`).
"""

from __future__ import annotations

import importlib
from pathlib import Path

from hpcrl.toolbox.plugins import PluginFolder
from hpcrl.weights.transports import find_transport


def register_receivers() -> None:
    """Make every receiver of this room known to vLLM in this process; one that is known already is left as it is."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name in PluginFolder(Path(__file__).parent).names():
        backend = find_transport(name).BACKEND
        if backend not in WeightTransferEngineFactory._registry:
            receiver = importlib.import_module(f"{__name__}.{name}").RECEIVER
            WeightTransferEngineFactory.register_engine(backend, receiver)
