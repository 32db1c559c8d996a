"""`hpcrl engines serve`: an engine that no run has started, for one run after another; and what a run borrows of its
keys.

    KEYS/http.key, KEYS/weights-*.json     keys (queue/auth.py), made by whoever serves first
    KEYS/engine-PORT-XXXXXXXX/             what one server is started with; gone when it ends

Invariants: one run at a time has the engines of a directory of keys, or else two would mix their weights; an engine
gets no key that opens another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from pathlib import Path
from typing import IO

import msgspec

from hpcrl.careful_files import open_regular
from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.config.rules.engine_rules import ADDRS, KEYS, split_address
from hpcrl.config.value_types import Kind
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.plan import Location, Plan
from hpcrl.queue.auth import HTTP_KEY, borrow_keys, lend_keys, make_engine_keys
from hpcrl.run.rundir import RunDir, write_atomic

PROGRAM = "hpcrl.engine.standalone"
USAGE = f"""\
usage: hpcrl engines serve RECIPE.toml --listen HOST:PORT --keys DIR [--option value ...]

  An engine that answers at HOST:PORT until it is ended, for one run after another. Its model, sizes and settings are those that the
  recipe's engines have; give it the GPUs with CUDA_VISIBLE_DEVICES.

  --listen HOST:PORT   where it answers: an address of this machine on the network of the runs that will ask it
  --keys DIR           where its keys are, or are made; a run that asks it has to read them, and nobody else may
  --stage NAME         whose settings, in a recipe of stages (default: the last that needs engines)

A run asks it with {ADDRS} HOST:PORT {KEYS} DIR."""
OWN = {"listen": Kind("str"), "keys": Kind("str"), "stage": Kind("str"), "help": Kind("bool")}


def serve(argv: list[str]) -> int:
    """The command; becomes the engine's own process."""
    overrides, own, words = parse_flags(argv, OWN)
    if "help" in own:
        print(USAGE)
        return 0
    if len(words) != 1 or not {"listen", "keys"} <= own.keys():
        raise UsageError(
            "a recipe, --listen and --keys are needed", "hpcrl engines serve RECIPE.toml --listen HOST:PORT --keys DIR"
        )
    split_address(own["listen"], "--listen")
    recipe = load_recipe(words[0])
    stages = dict(zip([s.name for s in recipe.stages], resolve_stages(recipe, overrides, _NOWHERE), strict=True))
    rundir = prepare(_choose(stages, own.get("stage")), own["listen"], Path(own["keys"]).expanduser().resolve())
    return os.execv(sys.executable, [sys.executable, "-m", PROGRAM, str(rundir.root), "--attempt", "0"])


_LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: what a recipe may say of its run, which is none here
_NOWHERE = {"run": "{run}", "prepared": "{run}/prepared"}


def _choose(stages: dict[str, Options], name: str | None) -> Options:
    with_engines = {stage: options for stage, options in stages.items() if options.needs_engines}
    if name is None and with_engines:
        found = list(with_engines.values())[-1]
    elif name in with_engines:
        found = with_engines[name]
    else:
        raise UsageError(
            f"no stage{f' {name}' if name else ''} of the recipe has engines", f"it has {', '.join(stages) or 'none'}"
        )
    if "{run}" in (found.hf_checkpoint or ""):
        raise UsageError(f"the model of the recipe is made by its run: {found.hf_checkpoint}", "give --hf-checkpoint")
    if found.colocate:
        raise UsageError("--colocate: engines that take turns with a trainer are started by its run", "leave it out")
    return found


def prepare(options: Options, listen: str, keys: Path) -> RunDir:
    """The directory that one server is started from.  HpcrlError where nothing can be written."""
    host, port = split_address(listen, "--listen")
    place = Location(host, tuple(range(options.rollout_num_gpus_per_engine)), host)
    try:
        make_engine_keys(keys)
        rundir = RunDir.create(tempfile.mkdtemp(prefix=f"engine-{port}-", dir=keys), ("keys", "attempts", "logs"))
    except OSError as error:
        raise HpcrlError(f"--keys {keys}: {error.strerror}", "name a directory that you can write to") from error
    rundir.begin()
    lend_keys(keys, listen, rundir.keys)
    write_atomic(rundir.options_file, options.model_dump_json().encode())
    write_atomic(rundir.plan_file, msgspec.json.encode(Plan("external", 0, (), (place,), place, (listen,))))
    return rundir


def borrow(rundir: RunDir, plan: Plan, options: Options) -> IO[bytes] | None:
    """Keys of the engines that the run does not start, into the run's; what is returned is held open as long as it has
    them.

    UsageError if they cannot be read, or another run has these engines.
    """
    if not plan.external:
        return None
    away = next((text for text in plan.external if split_address(text)[0] not in _LOOPBACK), None)
    if away and plan.trainers[0].at in _LOOPBACK:
        raise UsageError(
            f"{ADDRS} {away}: the run is on this machine alone and listens on {plan.trainers[0].at}, which that engine cannot reach",
            "start the run with hpcrl submit or hpcrl launch, or serve the engine here, at 127.0.0.1",
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
                f"another run has the engines of {KEYS} {folder}", "wait for its end, or serve others"
            ) from None
        borrow_keys(rundir, folder, plan.external, len(plan.engines))
        stack.pop_all()
    return lock
