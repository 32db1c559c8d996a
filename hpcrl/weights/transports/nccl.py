"""--weight-transfer nccl: pieces from GPU to GPU, for engines on GPUs of their own.

The bytes travel by hpcrl/weights/pieces/device_transport.py, which takes no whole tensors.  It has run on no GPU yet.
"""

from __future__ import annotations

from hpcrl.weights.transports import NoTransport, TransportConditions

BACKEND = "hpcrl_nccl"


def obstacle(site: TransportConditions) -> str | None:
    if site.cpu:
        return "needs CUDA, but vLLM's CPU build is installed"
    return "takes a GPU once, and with --colocate trainer and engines share theirs" if site.colocate else None


make = NoTransport
