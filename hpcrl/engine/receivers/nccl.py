"""The receiving end of --weight-transfer nccl with --weight-update resharded: pieces alone, over
`hpcrl/weights/pieces/device_transport.py`.

Whole tensors over NCCL go to vLLM's own backend.  NCCL's wire has run on no GPU yet.
"""

from __future__ import annotations

from hpcrl.engine.weight_loading import PiecesReceiver

RECEIVER = PiecesReceiver
