"""--weight-transfer ipc: pieces stay on the GPU where they were packed, or where a rank of another host took them in;
engines of the same host open that memory by CUDA IPC.

The bytes travel by hpcrl/weights/pieces/ipc_transport.py, which takes no whole tensors.  It has run on no GPU yet.
"""

from __future__ import annotations

from hpcrl.weights.transports import NoTransport, TransportConditions

BACKEND = "hpcrl_ipc"


def obstacle(site: TransportConditions) -> str | None:
    if site.cpu:
        return "needs CUDA, but vLLM's CPU build is installed"
    return None if site.colocate else "is for engines on the trainer's GPUs: it needs --colocate"


make = NoTransport
