"""--weight-transfer ipc: pieces stay on the GPU where they were packed; engines of the same host open that memory by
CUDA IPC.

The way of the bytes is hpcrl/weights/pieces/ipc_post.py: there are no whole tensors over it.  It has run on no GPU yet.
"""

from __future__ import annotations

from hpcrl.weights.transports import NoTransport, Site

BACKEND = PIECES = "hpcrl_ipc"


def obstacle(site: Site) -> str | None:
    if site.cpu:
        return "needs CUDA, but vLLM's CPU build is installed"
    if not site.one_host:
        return "needs trainer and engines on one host"
    return None if site.colocate else "is for engines on the trainer's GPUs: it needs --colocate"


make = NoTransport
