"""`hpcrl try`: a recipe tried by hand.

Invariant: nothing is left behind but an engine that ends by itself, and what is kept below the user's state directory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from hpcrl.config.flags import parse_flags
from hpcrl.config.value_types import Kind
from hpcrl.errors import DeadlineError, Interrupted, UsageError
from hpcrl.launch.engines.standalone import borrow
from hpcrl.plain_text import strip_control
from hpcrl.plan import Location, Plan
from hpcrl.recipe_here import choose_recipe
from hpcrl.run.process import PARENT
from hpcrl.run.rundir import FOLDERS, RunDir, write_atomic
from hpcrl.run.scratch import scratch
from hpcrl.tryout.kept_engine import HERE, KeptEngine, at_hand
from hpcrl.tryout.target import TriedModel, of_recipe

TRY = """\
usage: hpcrl try [RECIPE.toml] [--prompts N] [--responses N] [--stage NAME] [--option value ...]

  Prompts as the model gets them, token by token, with responses from the model that the recipe starts from, the reward
  of each, what the reward function said of its parts, and how long it took. Nothing is trained. The engine stays up for
  ten minutes, for the next hpcrl try with the same model and settings.

  --prompts N     how many (default: 4)
  --responses N   to each (default: 2)
  --stage NAME    of a recipe with stages (default: the last that samples)

Without a recipe it is recipe.toml of this directory. Other options are those of hpcrl run."""


def try_recipe(argv: list[str]) -> int:
    """`hpcrl try`."""
    flags = {"prompts": Kind("int"), "responses": Kind("int"), "stage": Kind("str")}
    overrides, own, words = parse_flags(argv, flags | {"help": Kind("bool")})
    if "help" in own or "-h" in words:
        print(TRY)
        return 0
    word = choose_recipe(words, None, "hpcrl try")
    counts = {"prompts": own.get("prompts", 4), "responses": own.get("responses", 2)}
    for name, value in counts.items():
        if value < 1:
            raise UsageError(f"--{name} {value} is less than 1", "give 1 or more")
    target = of_recipe(Path(word), overrides, own.get("stage"))
    engine = at_hand(target.options, target.folder)
    try:
        print(f"{strip_control(target.said)}: {target.options.hf_checkpoint}", flush=True)
        with scratch("try") as folder:
            return _sample(target, engine, folder / "run", counts)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: the engine stays up for a while, for the next hpcrl try") from None


def _sample(target: TriedModel, engine: KeptEngine, root: Path, counts: dict[str, int]) -> int:
    """Run the rollout's part of it, which prints what it finds."""
    options = target.options.model_copy(
        update={
            "rollout_num_gpus": 0,
            "rollout_external_engine_addrs": [engine.listen],
            "rollout_external_engine_keys": str(engine.keys),
            "eval_interval": None,
            "num_rollout": 1,
            "rollout_batch_size": counts["prompts"],
            "n_samples_per_prompt": counts["responses"],
            "reward_max_failed": 1.0,
            "custom_generate_max_failed": 1.0,
            "load_debug_rollout_data": None,
        }
    )
    rundir = RunDir.create(root, FOLDERS)
    rundir.begin()
    place = Location(HERE, (), HERE, "lo")
    plan = Plan("try", 0, (place,), (), place, (engine.listen,))
    write_atomic(rundir.options_file, options.model_dump_json().encode())
    write_atomic(rundir.plan_file, msgspec.json.encode(plan))
    lock = borrow(rundir, plan, options)
    words = [str(rundir.root), str(counts["prompts"]), str(counts["responses"])]
    # in a session of its own: Ctrl-C is for this process, and no traceback of the other one is on the screen
    command = [sys.executable, "-m", "hpcrl.rollout.one_try", *words]
    environment = os.environ | {PARENT: str(os.getpid())}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
    limit = options.rollout_timeout
    try:
        with engine.in_use():
            return process.wait(limit)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"it took more than --rollout-timeout {limit:.0f} s", "raise it") from None
    finally:
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
        if lock is not None:
            lock.close()
