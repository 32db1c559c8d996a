"""`hpcrl try`: a recipe tried by hand.

Invariants: the engine listens on the loopback of this machine and ends with the command; nothing is left behind but
what is kept below the user's state directory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
import psutil

from hpcrl.cli.recipe_argument import choose_recipe
from hpcrl.cli.try_target import TriedModel, of_recipe
from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.value_types import Kind
from hpcrl.errors import DeadlineError, HpcrlError, UsageError
from hpcrl.launch.standalone_engine import PROGRAM, borrow, prepare
from hpcrl.plan import Location, Plan
from hpcrl.run.process import PARENT, end_processes
from hpcrl.run.role import last_error
from hpcrl.run.rundir import FOLDERS, RunDir, write_atomic
from hpcrl.run.scratch import scratch
from hpcrl.utils.plain_text import strip_control
from hpcrl.utils.untrusted_files import open_append, read_regular
from hpcrl.utils.waiting import Deadline, poll

HERE = "127.0.0.1"
DIES_WITH_US = "hpcrl.run.process"
GRACE = 15.0  #: seconds from SIGTERM to SIGKILL: the engine ends vLLM first
POLL = 0.1

USAGE = """\
usage: hpcrl try [RECIPE.toml] [--prompts N] [--responses N] [--stage NAME] [--option value ...]

  Shows prompts token by token, responses of the recipe's first model, and the reward of each with its parts and time.
  Trains nothing. An engine starts on this machine and ends with the command.

  --prompts N     how many (default: 4)
  --responses N   to each (default: 2)
  --stage NAME    of a recipe with stages (default: the last that samples)

Without a recipe the command takes recipe.toml of this directory. Other options are those of hpcrl run."""


def try_recipe(argv: list[str]) -> int:
    """`hpcrl try`."""
    flags = {"prompts": Kind("int"), "responses": Kind("int"), "stage": Kind("str")}
    overrides, own, words = parse_flags(argv, flags)
    word = choose_recipe(words, None, "hpcrl try")
    counts = {"prompts": own.get("prompts", 4), "responses": own.get("responses", 2)}
    for name, value in counts.items():
        if value < 1:
            raise UsageError(f"--{name} {value} is less than 1", "give 1 or more")
    target = of_recipe(Path(word), overrides, own.get("stage"))
    print(f"{strip_control(target.description)}: {target.options.hf_checkpoint}", flush=True)
    with scratch("try") as folder:
        return _sample(target, folder, counts)


def _sample(target: TriedModel, folder: Path, counts: dict[str, int]) -> int:
    """Start an engine, and the rollout's part of a run, which prints what it finds; end both."""
    with socket.create_server((HERE, 0)) as free:
        listen = f"{HERE}:{free.getsockname()[1]}"
    keys, log = folder / "keys", target.folder / "engine.log"
    options = target.options.model_copy(
        update={
            "rollout_num_gpus": 0,
            "rollout_external_engine_addrs": [listen],
            "rollout_external_engine_keys": str(keys),
            "eval_interval": None,
            "num_rollout": 1,
            "rollout_batch_size": counts["prompts"],
            "n_samples_per_prompt": counts["responses"],
            "reward_max_failed": 1.0,
            "load_debug_rollout_data": None,
        }
    )
    served = prepare(target.options, listen, keys)
    rundir = RunDir.create(folder / "run", FOLDERS)
    rundir.make_attempt()
    place = Location(HERE, (), HERE, "lo")
    plan = Plan("try", 0, (place,), (), place, (listen,))
    write_atomic(rundir.options_file, options.model_dump_json().encode())
    write_atomic(rundir.plan_file, msgspec.json.encode(plan))
    print(f"hpcrl: starting an engine; log: {log}", file=sys.stderr, flush=True)
    log.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        if (lock := borrow(rundir, plan, options)) is not None:
            stack.enter_context(lock)
        out = stack.enter_context(open_append(log))
        engine = [sys.executable, "-m", PROGRAM, str(served.root), "--attempt", "0"]
        process = stack.enter_context(_child([sys.executable, "-m", DIES_WITH_US, *engine], out))
        words = [str(rundir.root), str(counts["prompts"]), str(counts["responses"])]
        shown = stack.enter_context(_child([sys.executable, "-m", "hpcrl.rollout.try_samples", *words]))
        return _wait(shown, process, log, options)


@contextlib.contextmanager
def _child(command: Sequence[str], out: IO[bytes] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with this context, and with this process.

    It has a session of its own: Ctrl-C is for this process, and no traceback of the other one is on the screen.

    Args:
        out: where its output goes; None: to ours.
    """
    environment = os.environ | {PARENT: str(os.getpid())}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=environment
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            end_processes([psutil.Process(process.pid)], GRACE)
        process.wait(timeout=GRACE)  # it has been killed


def _wait(shown: subprocess.Popen[bytes], engine: subprocess.Popen[bytes], log: Path, options: Options) -> int:
    """The exit status of what shows the samples.

    Raises:
        HpcrlError: with the engine's own last word if that ends first, DeadlineError if it takes too long.
    """
    limit = options.engine_start_timeout + options.rollout_timeout

    def over() -> bool:
        if shown.poll() is None and engine.poll() is not None:
            said = last_error(read_regular(log).splitlines())
            raise HpcrlError(f"the engine ended{f': {said}' if said else ''}", f"see {log}")
        return shown.returncode is not None

    if not poll(over, Deadline(limit), POLL):
        raise DeadlineError(
            f"starting the engine and sampling took more than {limit:.0f} s",
            "raise --timeout-factor",
        )
    return shown.returncode
