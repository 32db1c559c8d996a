"""An engine that no run has started (`hpcrl engines serve`): what it is started with, and what a run borrows of its
keys.

    KEYS/http.key                   what keys are made from (transport/auth.py), by the first `serve`
    KEYS/engine-PORT-XXXXXXXX/      what one server is started with; removed when it ends

Invariants: one run at a time has the engines of a directory of keys, or else two would mix their weights; an engine
gets no key that opens another.
"""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from pathlib import Path
from typing import IO

import msgspec

from hpcrl.config.options import Options
from hpcrl.config.rules.layout import ADDRS, KEYS, split_address
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.plan import Location, Plan
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.transport.auth import HTTP_KEY, borrow_keys, lend_keys, make_engine_keys
from hpcrl.utils.untrusted_files import open_regular

PROGRAM = "hpcrl.engine.standalone"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def prepare(options: Options, listen: str, keys: Path) -> RunDir:
    """The directory that one server is started from.

    Raises:
        HpcrlError: where nothing can be written.
    """
    host, port = split_address(listen, "--listen")
    place = Location(host, tuple(range(options.rollout_num_gpus_per_engine)), host)
    try:
        make_engine_keys(keys)
        rundir = RunDir.create(tempfile.mkdtemp(prefix=f"engine-{port}-", dir=keys), ("keys", "attempts", "logs"))
    except OSError as error:
        raise HpcrlError(f"--keys {keys}: {error.strerror}", "name a directory that you can write to") from error
    rundir.make_attempt()
    lend_keys(keys, listen, rundir.keys)
    write_atomic(rundir.options_file, options.model_dump_json().encode())
    write_atomic(rundir.plan_file, msgspec.json.encode(Plan("external", 0, (), (place,), place, (listen,))))
    return rundir


def elsewhere(options: Options) -> str | None:
    """The first of the engines that the run does not start which is not on its own machine, as its address."""
    addresses = options.rollout_external_engine_addrs if options.needs_engines else ()
    return next((text for text in addresses if split_address(text)[0] not in _LOOPBACK), None)


def borrow(rundir: RunDir, plan: Plan, options: Options) -> IO[bytes] | None:
    """Keys of the engines that the run does not start, into the run's; what is returned is held open as long as it has
    them.

    Raises:
        UsageError: if they cannot be read, or another run has these engines.
    """
    if not plan.external:
        return None
    away = elsewhere(options)
    if away and plan.trainers[0].at in _LOOPBACK:
        raise UsageError(
            f"{ADDRS} {away}: the run is on this machine alone and listens on {plan.trainers[0].at}, "
            "which that engine cannot reach",
            "start the run with hpcrl submit or hpcrl launch (without --interface lo), or serve the engine here, at "
            "127.0.0.1",
        )
    folder = Path(options.rollout_external_engine_keys or "").expanduser()
    try:
        lock = open_regular(folder / HTTP_KEY)
    except OSError as error:
        raise UsageError(
            f"{KEYS} {folder}: {error.strerror}", "is it what hpcrl engines serve --keys was given?"
        ) from error
    with contextlib.ExitStack() as stack:
        stack.callback(lock.close)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another run uses the engines of {KEYS} {folder}", "wait until it ends, or serve other engines"
            ) from None
        borrow_keys(rundir, folder, plan.external, len(plan.engines))
        stack.pop_all()
    return lock
