"""The gloo groups of vLLM's own processes: the engine core's and its workers'.  They prove who they are as ranks do,
and read what they send one another as plain values.

vLLM itself reads Python objects that come over them with Python's own unpickler, so that a process in a worker's place
would run code here.  Every process of an engine calls `prove_engine_groups` before vLLM makes a group: the server,
which some are forked from (`server.py`); those that it spawns, at their start (the same file, as `__mp_main__`); and
each worker again when it is made (`weight_receiver.py`), however it was started.

Invariant: the key is of this engine in this incarnation, comes from the file that the guard of its HTTP reads, and is
in no argument or environment.
"""

from __future__ import annotations

import os

from hpcrl.engine.key_guard import KEY_FILE, read_key

SPAWNED = "__mp_main__"  #: what multiprocessing calls the main module of a process that it has spawned


def prove_engine_groups() -> None:
    """Have every gloo group of this process proved from now on, and objects that come over groups read as plain values;
    nothing where this is no engine of hpcrl's."""
    if os.environ.get(KEY_FILE):
        import vllm  # noqa: F401  (the first: it sets what torch reads when it is imported)

        from hpcrl.peer_proof.gloo_groups import prove_groups
        from hpcrl.peer_proof.proof import pair_key
        from hpcrl.pickles.torch_patches import refuse_foreign_pickles_of_vllm

        refuse_foreign_pickles_of_vllm()
        prove_groups(pair_key(read_key()))
