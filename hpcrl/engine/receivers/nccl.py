"""The receiving end of --weight-transfer nccl: pieces alone, over `hpcrl/weights/pieces/device_transport.py`.

NCCL's wire has run on no GPU yet.
"""

from __future__ import annotations

from hpcrl.engine.weight_loading import PiecesReceiver

RECEIVER = PiecesReceiver
