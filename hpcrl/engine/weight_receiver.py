"""The receiving end of weight updates, inside vLLM's workers (loaded there through --worker-extension-cls).

Here are a few calls for POST /collective_rpc: what the engine holds, which pieces will come, taking them, whether it
holds what was sent, giving up an update.  weight_loading.py loads them.

Invariants: those of weight_loading.py; what loads or puts back weights does so with vLLM's configuration set, as in
vLLM's own update, since kernels of FP8 experts are made again with each load and ask for it; importing this does
nothing; nothing from the wire is unpickled or imported by name; no worker outlives its server.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future
from typing import Any, Self

import msgspec
from vllm.config import VllmConfig, set_current_vllm_config

from hpcrl.engine.cpu_build import give_back
from hpcrl.engine.drafts.cpu_sampler import repair
from hpcrl.engine.drafts.own_layers import own_layers
from hpcrl.engine.loading.empty_start import register_empty_start
from hpcrl.engine.params.adapter_slot import AdapterSlot
from hpcrl.engine.params.layers import Holdings, shown
from hpcrl.engine.pieces.piece_receiver import PieceReceiver, join
from hpcrl.engine.routed_experts import ExpertTables
from hpcrl.engine.vllm_pickles import read_by_list
from hpcrl.engine.weight_loading import Receiver, UpdateRejected, register_receiver
from hpcrl.models.lora.serving import of_environment
from hpcrl.run.process import PARENT, die_with_parent
from hpcrl.weights.comparison import digest
from hpcrl.weights.pieces.wire import process_identity, read_join_command
from hpcrl.weights.worker_calls import AnswerStore, worker_name

#: what `hpcrl_answer` calls
ANSWERS = ("hpcrl_manifest", "hpcrl_abandon", "hpcrl_check")
JOINING = 60.0  #: seconds from rank 0's own joining to the last worker's


def _close(joined: Future[PieceReceiver]) -> None:
    if joined.exception() is None:
        joined.result().close()


class WorkerExtension:
    """Methods of each worker for POST /collective_rpc; only text and plain values cross.

    vLLM makes it a base of its worker's class, so that `__new__` runs once in every worker's process: when the worker
    is made, before it has a model or a weight-transfer engine.  (Its own `__init__` would not be called.)
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        read_by_list()
        register_receiver()
        register_empty_start()
        repair()
        os.environ.pop(PARENT, None)  # names the server, but vLLM's engine core may stand between it and this worker
        die_with_parent()  # a worker never outlives who started it, however that one ends
        return super().__new__(cls)

    model_runner: Any
    vllm_config: VllmConfig
    rank: int
    weight_transfer_engine: Receiver
    _weight_update_active: bool
    _hpcrl_experts: ExpertTables | None = None
    _hpcrl_joining: Future[PieceReceiver] | None = None
    _hpcrl_pieces: PieceReceiver | None = None

    def hpcrl_answer(self, store: str, method: str, *arguments: str) -> None:
        """Call one of these methods, and put what it returns into a store (`AnswerStore`): vLLM hands on what the first
        of several data-parallel parts answers alone."""
        if method not in ANSWERS:
            raise ValueError(f"{method} is not a method with an answer")
        where = msgspec.json.decode(store, type=AnswerStore)
        where.put(self._hpcrl_name, getattr(self, method)(*arguments))

    @property
    def _hpcrl_name(self) -> str:
        config = self.weight_transfer_engine.parallel_config
        return worker_name(getattr(config, "data_parallel_index", 0), self.rank)

    def hpcrl_manifest(self) -> dict[str, Any]:
        """Which tensors an update must bring, and which parts of them this worker holds."""
        held = self._hpcrl_held()
        return {
            "backend": self.weight_transfer_engine.config.backend,
            "worker": self._hpcrl_name,
            "where": process_identity(),
            "tensors": {name: piece.to_wire() for name, piece in held.pieces.items()},
            "opaque": list(held.opaque),
            "unseen": {name: {"shape": entry.shape, "dtype": entry.dtype} for name, entry in held.unseen.items()},
            "cuts": {name: {"rows": rows, "columns": columns} for name, (rows, columns) in held.cuts.items()},
        }

    def hpcrl_join(self, command: str) -> None:
        """Begin to join the trainer's ranks and the other workers, and learn which pieces every update will bring
        (`WorkerJoinCommand`)."""
        self._hpcrl_leave()
        self._hpcrl_joining = join(read_join_command(command), self._hpcrl_name, self._hpcrl_held())

    def hpcrl_joined(self) -> dict[str, bool]:
        """Whether this worker has joined; raises why it cannot."""
        if self._hpcrl_joining is not None and self._hpcrl_joining.done():
            self._hpcrl_pieces = self._hpcrl_joining.result()
        return {"joined": self._hpcrl_pieces is not None}

    def hpcrl_take_pieces(self) -> dict[str, int]:
        """Receive and load an update that was started; bytes of tensors that had come in part, at most."""
        if self._hpcrl_joining is None:
            raise UpdateRejected("the plan of pieces was not made known")
        reader = self._hpcrl_pieces = self._hpcrl_joining.result(JOINING)
        try:
            with set_current_vllm_config(self.vllm_config):
                self.weight_transfer_engine.take_pieces(reader)
        except BaseException:
            self._hpcrl_leave()
            raise
        return {"bytes": reader.assembly.most}

    def _hpcrl_leave(self) -> None:
        if self._hpcrl_joining is not None:
            self._hpcrl_joining.add_done_callback(
                _close
            )  # one that still waits for others closes as soon as it has come
        self._hpcrl_joining = self._hpcrl_pieces = None

    def hpcrl_check(self, expected: str) -> dict[str, Any]:
        """Compare what the model multiplies with to {name of the worker: {name: digest of its part}}, given as JSON.

        Returns:
            How many were compared, which differ, and which were expected and cannot be shown.
        """
        wanted: dict[str, str] = json.loads(expected)[self._hpcrl_name]
        different = []
        compared = 0
        for name, tensor in shown(self._hpcrl_held()):
            compared += 1
            if wanted.pop(name, None) != digest(tensor):
                different.append(name)
        return {"worker": self._hpcrl_name, "compared": compared, "different": different, "unknown": sorted(wanted)}

    def hpcrl_see_experts(self) -> None:
        """From now on keep the experts of the requests that ask for them; a second call does nothing."""
        if self._hpcrl_experts is None:
            self._hpcrl_experts = ExpertTables(self.model_runner)

    def hpcrl_take_experts(self, request: str, tokens: int) -> tuple[int, int, bytes]:
        """Those of a request, as `ExpertTables.pop_table`."""
        assert self._hpcrl_experts is not None, "hpcrl_see_experts comes first"
        return self._hpcrl_experts.pop_table(request, tokens)

    def hpcrl_give_memory_back(self, level: int) -> int:
        """On a CPU: what vLLM's sleep of `level` would free on a GPU; by how many bytes we shrank."""
        return give_back(self.model_runner.model, self.model_runner.kv_caches, level)

    def hpcrl_abandon(self) -> dict[str, str]:
        """Give up an update that was started and not finished."""
        self._hpcrl_leave()
        engine = self.weight_transfer_engine
        with set_current_vllm_config(self.vllm_config):
            engine.put_back()
        self._weight_update_active = False
        return {"worker": self._hpcrl_name}

    def hpcrl_hold(self, what: str) -> None:
        """From now on updates bring the base, without an adapter, or the adapter."""
        self._hpcrl_leave()
        self._hpcrl_engine().hold_base(what == "base")

    def _hpcrl_engine(self) -> Receiver:
        engine = self.weight_transfer_engine
        if engine.slot is None and (settings := of_environment(os.environ)) is not None:
            engine.slot = AdapterSlot(self.model_runner, settings)
        return engine

    def _hpcrl_held(self) -> Holdings:
        engine = self._hpcrl_engine()
        if engine.parameters is None:
            engine.drafts = own_layers(self)
        return engine.take_stock()
