"""A rank of the self-test: the checks that are named, one after another, in the group that the environment names.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 python -m hpcrl.doctor.selftest.rank DIR --port-file FILE
    NAME ... python -m hpcrl.doctor.selftest.rank DIR --alone NAME ...

Invariant: rank 0 alone writes results, after every rank has said its own; a rank that fails makes the check fail.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcrl.doctor.selftest.registry import Check, CheckContext, Outcome, Results, choose_checks, find_checks, try_check
from hpcrl.errors import DeadlineError
from hpcrl.run.process import PARENT, die_with_parent
from hpcrl.run.rundir import write_atomic
from hpcrl.utils.untrusted_files import read_regular
from hpcrl.utils.waiting import Deadline, poll

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

DEADLINE = 180.0  #: seconds that a collective may wait for the slowest rank


def gather(mine: Outcome) -> Outcome:
    """Rank 0's own, or the first that failed."""
    from hpcrl.trainer.collectives import gather_json

    found = [msgspec.convert(told, Outcome) for told in gather_json(mine)]
    return next((outcome for outcome in found if outcome.result == "failed"), found[0])


def run_checks(chosen: dict[str, Check], place: CheckContext, results: Results, together: bool) -> None:
    """One after another; each has its own directory."""
    for name, check in chosen.items():
        if place.rank == 0:
            results.start_check(name)
        own = place.directory / "work" / name
        own.mkdir(parents=True, exist_ok=True)
        outcome = try_check(check, replace(place, directory=own))
        if together:
            outcome = gather(outcome)
        if place.rank == 0:
            results.write(name, outcome)


def device_alone() -> torch.device:
    """The first GPU, or the CPU, as a trainer's only rank; Megatron works on either."""
    import torch

    from hpcrl.trainer.parallel_state import cuda_is_there

    if importlib.util.find_spec("megatron") is not None:
        from hpcrl.trainer.megatron import replaced

        replaced.install()
    if cuda_is_there(os.environ.get("CUDA_VISIBLE_DEVICES")):
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    return torch.device("cpu")


def each_alone(chosen: dict[str, Check], results: Results, directory: Path) -> int:
    """Each check in a separate process, since a deterministic mode, say, is never taken back; the exit status of the
    first that ended badly.

    Of several each is a fork of this process, which then has imported what they need: that takes longer than the
    checks.  Only where there is no GPU, which a fork could not use.
    """
    from hpcrl.trainer.checkpoint.to_torch_dist import alone

    alone()
    if len(chosen) == 1:
        run_checks(chosen, CheckContext(0, 1, device_alone(), directory), results, together=False)
        return 0
    device = device_alone()
    with contextlib.suppress(ImportError):  # the checks that need it say so
        importlib.import_module("hpcrl.trainer.megatron.model")
    for name, check in chosen.items():
        if (pid := os.fork()) == 0:
            os.environ.pop(PARENT, None)
            die_with_parent()
            run_checks({name: check}, CheckContext(0, 1, device, directory), results, together=False)
            os._exit(0)
        if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            return status if status > 0 else 128 - status
    return 0


def join(seconds: float, port_file: Path | None = None) -> torch.device:
    """Form the group that the environment names, within `seconds`; the device of this rank."""
    import torch
    import torch.distributed as dist

    from hpcrl.trainer.collectives import connect_when_needed

    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    wait = timedelta(seconds=seconds)
    store = _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, port_file, seconds)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    bound = {} if device.type == "cpu" else {"device_id": device}
    connect_when_needed()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=wait, **bound)
    return device


def _store(address: str, port: int, rank: int, port_file: Path | None, seconds: float) -> TCPStore:
    """Where the ranks meet.

    Raises:
        DeadlineError: if rank 0 does not tell its port in `port_file`.
    """
    from hpcrl.transport.torch_store import connect_store, open_store

    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = open_store(address)
        store.set_timeout(timedelta(seconds=seconds))
        if port_file:
            write_atomic(port_file, str(store.port).encode())
        return store
    if not port and port_file:
        if not poll(port_file.exists, Deadline(seconds), 0.05):
            raise DeadlineError(f"rank 0 did not write {port_file} within {seconds:.0f} s", "see its log")
        port = int(read_regular(port_file))
    return connect_store(address, port, seconds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One rank of the self-test.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--alone", action="store_true", help="the only rank, in no group yet; several checks: forks")
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--link", type=float, help="bytes a second of the network between the hosts")
    args = parser.parse_args(argv)
    die_with_parent()
    chosen = choose_checks(args.names, find_checks())
    results = Results(args.directory)
    if args.alone:
        return each_alone(chosen, results, args.directory)
    import torch.distributed as dist

    device = join(DEADLINE, args.port_file)
    place = CheckContext(dist.get_rank(), dist.get_world_size(), device, args.directory, args.hosts, args.link)
    try:
        run_checks(chosen, place, results, together=True)
        dist.barrier()  # rank 0 holds the store: no rank leaves before all are done
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
