"""The one place that makes torch and vLLM read with hpcrl's list what ranks and workers send one another, and
`.metadata`.

Invariants: in a process in which `refuse_foreign_pickles` was called, torch's object collectives, and torch's and
Megatron-core's readers of a checkpoint's `.metadata`, unpickle by the list alone.  The same holds for what vLLM
unpickles of a group, of a store, and of processes on other hosts, where `refuse_foreign_pickles_of_vllm` was called.
What its processes on one host write into memory of this user is read as vLLM reads it.
"""

from __future__ import annotations

import importlib
import pickle
from types import SimpleNamespace
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.transport.pickles import plain
from hpcrl.transport.pickles.values import refused

QUEUES = "vllm.distributed.device_communicators.shm_broadcast"


def refuse_foreign_pickles() -> None:
    """Have torch's object collectives, and its reader of checkpoints, in this process read plain values alone.

    Raises:
        HpcrlError: if torch has no such place.
    """
    _put("torch.distributed.distributed_c10d", "_pickler", plain.PlainPickler)
    _put("torch.distributed.distributed_c10d", "_unpickler", plain.PlainUnpickler)
    _put("torch.distributed.checkpoint.filesystem", "pickle", SimpleNamespace(dump=pickle.dump, load=plain.load))


def refuse_foreign_pickles_of_vllm() -> None:
    """The same in a process of an engine, and for what vLLM sends by itself.

    Raises:
        HpcrlError: if torch or vLLM has no such place.
    """
    refuse_foreign_pickles()
    _put("vllm.distributed.parallel_state", "pickle", plain)
    _put("vllm.distributed.utils", "pickle", plain)
    written = SimpleNamespace(Pickler=plain.ArrayPickler, HIGHEST_PROTOCOL=pickle.HIGHEST_PROTOCOL, loads=pickle.loads)
    _put(QUEUES, "pickle", written)
    queue = importlib.import_module(QUEUES).MessageQueue
    if not hasattr(queue.recv, "of_hpcrl"):
        queue.recv = staticmethod(_receive(queue.recv))


def _receive(theirs: Any) -> Any:
    """vLLM's function that reads a message of a queue, with ours for those that come over the network."""
    import zmq

    def receive(socket: zmq.Socket[bytes], timeout: float | None) -> Any:
        if not socket.getsockopt(zmq.LAST_ENDPOINT).startswith(b"tcp:"):
            return theirs(socket, timeout)
        if not socket.poll(None if timeout is None else max(0, int(timeout * 1000))):
            raise TimeoutError
        first, *buffers = socket.recv_multipart(copy=False)
        found = plain.loads(first.bytes, buffers)
        if type(found) is tuple and found and type(found[0]) is bytes:  # vLLM's workers unpickle it, and call it
            raise refused("a function")
        return found

    receive.of_hpcrl = True  # type: ignore[attr-defined]
    return receive


def _put(module: str, name: str, ours: Any) -> None:
    found = importlib.import_module(module)
    if not hasattr(found, name):
        raise HpcrlError(
            f"this version of {module.partition('.')[0]} has no {module}.{name}, through which hpcrl keeps the "
            "messages of strangers from being run",
            "docs/install.md lists the versions that were tried",
        )
    setattr(found, name, ours)
