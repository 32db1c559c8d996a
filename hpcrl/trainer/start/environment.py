"""The environment of trainer ranks, from the options and the plan.  Imports no torch: it must be set before that.

Invariant: gloo and NCCL talk over the plan's network, never over whatever interface the host's name leads to.
"""

from __future__ import annotations

import os

from hpcrl.plan import socket_names, visible_devices
from hpcrl.run.role import RoleContext


def prepare_environment(context: RoleContext, ranks: tuple[int, ...]) -> None:
    """Set the environment of these ranks, which share a host; what the user has set stays, where that is safe."""
    places = [context.plan.trainers[rank] for rank in ranks]
    os.environ.setdefault("OMP_NUM_THREADS", str(context.options.trainer_threads))
    for name, value in socket_names(places[0]).items():
        os.environ.setdefault(name, value)
    slots = tuple(slot for place in places for slot in place.slots)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), slots)
    os.environ.update(context.options.train_env_vars)
