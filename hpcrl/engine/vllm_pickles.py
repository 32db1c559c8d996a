"""What vLLM's own processes send one another is read by hpcrl's list.

vLLM reads Python objects that come over groups, stores and queues with Python's own unpickler, so that a process in a
worker's place would run code here.  Every process of an engine calls `read_by_list` before vLLM makes a group: the
server, which some are forked from (`server.py`); those that it spawns, at their start (the same file, as
`__mp_main__`); and each worker again when it is made (`weight_receiver.py`), however it was started.
"""

from __future__ import annotations

import os

from hpcrl.engine.key_guard import KEY_FILE

SPAWNED = "__mp_main__"  #: what multiprocessing calls the main module of a process that it has spawned


def read_by_list() -> None:
    """Have this process read objects of others as plain values; nothing where this is no engine of hpcrl's."""
    if os.environ.get(KEY_FILE):
        import vllm  # noqa: F401  (the first: it sets what torch reads when it is imported)

        from hpcrl.transport.pickles.torch_patches import refuse_foreign_pickles_of_vllm

        refuse_foreign_pickles_of_vllm()
