"""One process of a measurement: `python -m bench.queue_roles.run TRANSPORT ROLE WARM TIMED BATCHES SCRATCH CONTROL_FD`.

ROLE is produce or consume (joined by the socket CONTROL_FD), or alone.  Prints one JSON object: seconds of each timed
pass (null from a producer), and this process's CPU seconds of all timed passes (null where others do the work).
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

from bench.queue_roles import ours, peers, plain
from bench.queue_roles.work import Control, Passes
from hpcrl.run.process import die_with_parent

PAIRS: dict[str, tuple[Any, Any]] = {
    "ours": (ours.produce, ours.consume),
    "zmq": (plain.zmq_produce, plain.zmq_consume),
    "zmq-curve": (plain.zmq_produce_encrypted, plain.zmq_consume),
    "tcp": (plain.tcp_produce, plain.tcp_consume),
    "redis": (peers.redis_produce, peers.redis_consume),
}
ALONE: dict[str, Any] = {
    "memcpy": plain.memory,
    "ray": peers.ray_put,
    "ray-queue": peers.ray_queue,
}


def main() -> None:
    name, role, warm, timed, batches, scratch, fd = sys.argv[1:]
    die_with_parent()
    passes = Passes(int(warm), int(timed), int(batches))
    directory = Path(scratch)
    if role == "alone":
        control = Control(None)
        seconds = ALONE[name](control, passes, directory)
    else:
        with socket.socket(fileno=int(fd)) as joined, joined.makefile("rw") as file:
            control = Control(file)
            seconds = PAIRS[name][role == "consume"](control, passes, directory)
    cpu = control.cpu[-1] - control.cpu[passes.warm] if control.cpu else None
    print(json.dumps({"seconds": seconds, "cpu": cpu}))


if __name__ == "__main__":
    main()
