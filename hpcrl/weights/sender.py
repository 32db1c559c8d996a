"""The trainer's side of a weight update: its tensors into all running engines, under a new version.

One update goes through vLLM's own phases, on all engines at the same time:
    pause (requests are kept) -> forget prefixes -> start -> update -> finish, with the version ->
    (compare, on request) -> resume (the KV cache of kept requests is recomputed with the new weights)
Engines that take turns with the trainer sleep meanwhile: they are neither paused nor resumed here
(`hpcrl.weights.colocation`).

Invariants: what the engines hold is checked by name, shape and dtype before and, with --check-weight-update-equal, bit
for bit after an update; an update that fails ends the attempt, and engines that the next one keeps stay paused until it
has brought them a whole update.  Nothing is pickled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.config.options import Options
from hpcrl.engine.membership.broadcast import EngineBroadcast, EngineLost
from hpcrl.engine.membership.registry import Engine
from hpcrl.errors import HpcrlError, PeerError, UsageError
from hpcrl.models.files.fp8 import Stream, scheme_of
from hpcrl.models.lora.serving import serves_adapter
from hpcrl.run.rundir import RunDir
from hpcrl.weights.comparison import Comparison, Differs, dtype_name
from hpcrl.weights.disk import DiskUpdate, Written
from hpcrl.weights.pieces.piece_update import PieceUpdate
from hpcrl.weights.pieces.planning import Source, needed_tensors, stranger
from hpcrl.weights.update_backend import DISK, VLLM, VLLM_IPC
from hpcrl.weights.vllm_transfer import VllmIpcUpdate, VllmUpdate
from hpcrl.weights.worker_calls import WorkerCalls

NOTICED = 3.0  #: seconds within which the end of an engine shows


@dataclass
class WeightSender:
    """Sends the policy to the engines that it is connected to; made and used by every trainer rank, driven by one.

    Attributes:
        host: address of the driver.
        base: engines with an adapter are sent the weights under it.
        written: called with each directory that --weight-transfer disk has written.
        identity: the run's, in the name of these directories.
    """

    rundir: RunDir
    host: str
    options: Options
    is_driver: bool
    written: Written | None = None
    identity: str = "run"
    base: bool = False
    fleet: EngineBroadcast | None = None
    update: PieceUpdate | DiskUpdate | VllmUpdate | VllmIpcUpdate | None = None
    manifests: list[list[dict[str, Any]]] = field(default_factory=list)
    comparison: Comparison | None = None
    _outline: tuple[Any, ...] | None = None  # what all engines that ever came have in common

    def __post_init__(self) -> None:
        self.adapter = self.is_driver and serves_adapter(self.options)
        coded = self.is_driver and self.options.hf_checkpoint and (self.base or not self.adapter)
        self.scheme = scheme_of(self.options.hf_checkpoint) if coded else None

    def connect(self, engines: Sequence[Engine]) -> None:
        """Make these the engines that are sent to; driver only. Nothing happens if they are already.

        Raises:
            PeerError, DeadlineError: name the one that does not answer.
        """
        if self.fleet is not None and self.update is not None and self.fleet.engines == tuple(engines):
            return
        self.close()
        self.fleet = EngineBroadcast(self.rundir, engines, self.options.update_timeout)
        self._link(self.fleet)

    def _link(self, fleet: EngineBroadcast) -> None:
        calls = self._calls(fleet)
        calls.call("ending what was under way", "hpcrl_abandon")
        if self.adapter:
            fleet.call("choosing what is sent", "hpcrl_hold", "base" if self.base else "adapter")
        self.manifests = calls.call("asking for the manifest", "hpcrl_manifest")
        self._agree()
        self.needs = needed_tensors(self.manifests)
        first = self.manifests[0][0]
        # prefixes of tensors that the engines do not describe
        self.unknown = () if first["unseen"] else tuple(first["opaque"])
        self.ties: dict[str, list[str]] = {}
        for name, need in first["tensors"].items():
            if need["same_as"]:
                self.ties.setdefault(need["same_as"], []).append(name)
        self.update = self._way(fleet)

    def _way(self, fleet: EngineBroadcast) -> PieceUpdate | DiskUpdate | VllmUpdate | VllmIpcUpdate:
        """How updates go to these engines.

        Raises:
            UsageError: if it is not known how they hold part of the model.
        """
        first = self.manifests[0][0]
        if first["backend"] == DISK:
            return DiskUpdate(fleet, self.options, self.scheme, self.written, self.identity)
        if first["opaque"] and not first["unseen"]:
            raise UsageError(
                f"how the engines hold {first['opaque'][0]}* is unknown, so it cannot be updated",
                "use --weight-transfer disk",
            )
        if first["backend"] in (VLLM, VLLM_IPC):
            kind = VllmUpdate if first["backend"] == VLLM else VllmIpcUpdate
            return kind(fleet, self.manifests, self.options, self.scheme)
        return PieceUpdate(fleet, self.manifests, self.options, self.scheme, self.host)

    def _calls(self, fleet: EngineBroadcast) -> WorkerCalls:
        """Of the workers of all data-parallel parts; with files, for which engines are reached by HTTP alone, of the
        first."""
        parts = 1 if self.options.weight_transfer == "disk" else self.options.engine_data_parallel_size
        return WorkerCalls(fleet, parts, self.host)

    def _agree(self) -> None:
        """Raise PeerError unless all engines need the same tensors."""
        first = self.manifests[0][0]
        self._outline = self._outline or _outline(first)
        for engine, workers in zip(self._engines, self.manifests, strict=True):
            if any(_outline(worker) != self._outline for worker in workers):
                raise PeerError(
                    f"{engine} holds another model, or takes weights in another way, than the engines before it"
                )
        if self.options.check_weight_update_equal and first["opaque"]:
            raise UsageError(
                f"--check-weight-update-equal cannot compare {first['opaque'][0]}* of this model", "leave it out"
            )

    @property
    def _engines(self) -> tuple[Engine, ...]:
        assert self.fleet is not None
        return self.fleet.engines

    def publish(self, source: Source, version: int) -> dict[str, float]:
        """Put the policy into all engines as `version`; every rank calls it with its side of the export.

        Returns:
            Seconds and bytes as metrics (driver only).

        Raises:
            PeerError, DeadlineError, HpcrlError: name engine, host and phase.
        """
        if not self.is_driver:
            source.follow()
            return {}
        try:
            return self._publish(source, version)
        finally:
            source.finish_update()

    def _publish(self, source: Source, version: int) -> dict[str, float]:
        assert self.fleet is not None and self.update is not None, "connect() comes first"
        begin = time.monotonic()
        compare = self.options.check_weight_update_equal
        self.comparison = Comparison(self.manifests, self.ties) if compare else None
        try:
            self.update.stage(source, self._checked, compare, version)
            paused = time.monotonic()
            if not self.options.takes_turns:  # asleep, and with an empty cache, as it is
                self.fleet.post("pausing", "/pause?mode=keep")
                self.fleet.post("resetting the prefix cache", "/reset_prefix_cache?reset_running_requests=true")
            self.fleet.post("the weight update's start", "/start_weight_update")
            self.update.send()
            self.fleet.post("the weight update's finish", "/finish_weight_update", {"weight_version": str(version)})
            if self.comparison:
                self.comparison.compare(self._calls(self.fleet))
            if not self.options.takes_turns:
                self.fleet.post("resuming", "/resume")
        except BaseException as error:
            self.close()
            said = isinstance(error, Differs | EngineLost) or self.rundir.failure() is not None
            if isinstance(error, PeerError) and not said:
                self.fleet.name_dead("the weight update", NOTICED)  # gloo and NCCL name the one that waited for it
            raise
        end = time.monotonic()
        return {
            "perf/update_weights_time": end - begin,
            "perf/update_weights_pause_time": end - paused,
            "perf/update_weights_bytes": float(self.update.bytes),
        }

    def _checked(self, tensors: Stream) -> Stream:
        """Whole tensors in the engines' dtypes, noted for the comparison.

        To and from FP8 nothing is cast here: without scales the numbers would mean nothing.

        Raises:
            HpcrlError: for one that they do not have in that shape, or get twice, or at the end do not get.
        """
        import torch

        missing = set(self.needs)
        for name, tensor in tensors:
            need = self.needs.get(name)
            if need is None and name.startswith(self.unknown or "\0"):
                yield name, tensor
                continue
            if need is None:
                raise HpcrlError(f"the trainer's {name} {stranger(name, self.manifests)}")
            if name not in missing:
                raise HpcrlError(f"the trainer has exported {name} twice, the engines need it once")
            if tuple(tensor.shape) != need.shape:
                raise HpcrlError(
                    f"the trainer's {name} has shape {list(tensor.shape)}, the engines need {list(need.shape)}"
                )
            if "float8" in f"{tensor.dtype}{need.dtype}" and dtype_name(tensor) != need.dtype:
                raise HpcrlError(f"the trainer's {name} is {dtype_name(tensor)}, the engines need {need.dtype}")
            tensor = tensor.detach().to(getattr(torch, need.dtype))
            if self.comparison:
                self.comparison.note(name, tensor)
            missing.discard(name)
            yield name, tensor
        if missing:
            raise HpcrlError(
                f"the trainer has not exported {len(missing)} tensors of the engines, the first is {min(missing)}"
            )

    def close(self) -> None:
        """Give up memory and group; the engines stay as they are."""
        if self.update is not None:
            self.update.forget()  # its store ends, which tells members that still wait for one another
        self.update = None


def _outline(manifest: dict[str, Any]) -> tuple[Any, ...]:
    """What all workers must have in common."""
    tensors = {name: (held["shape"], held["dtype"], held["same_as"]) for name, held in manifest["tensors"].items()}
    return manifest["backend"], tensors, manifest["opaque"], manifest["unseen"]
