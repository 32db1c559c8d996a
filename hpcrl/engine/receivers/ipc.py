"""The receiving end of --weight-transfer ipc: pieces alone, over `hpcrl/weights/pieces/ipc_transport.py`."""

from __future__ import annotations

from hpcrl.engine.weight_loading import PiecesReceiver

RECEIVER = PiecesReceiver
