"""The receiving end of --weight-transfer ipc: pieces alone, over `hpcrl/weights/pieces/ipc_post.py`."""

from __future__ import annotations

from hpcrl.engine.pieces.receiver import PiecesReceiver

RECEIVER = PiecesReceiver
