"""`hpcrl chat`, `hpcrl serve`, `hpcrl try`: a model or a recipe tried by hand.

Invariant: nothing is left behind but an engine that ends by itself, and what is kept below the user's state directory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.flags import parse_flags
from hpcrl.config.rules.layout import split_address
from hpcrl.config.value_types import Kind
from hpcrl.engines.served import KEY_TO, OURS
from hpcrl.errors import DeadlineError, Interrupted, PeerError, UsageError
from hpcrl.launch.engines.standalone import PROGRAM, borrow, prepare
from hpcrl.plain_text import strip_control
from hpcrl.plan import Location, Plan
from hpcrl.recipe_here import choose_recipe
from hpcrl.run.process import PARENT
from hpcrl.run.rundir import FOLDERS, RunDir, write_atomic
from hpcrl.run.scratch import scratch
from hpcrl.tryout.conversation import Chat
from hpcrl.tryout.kept_engine import HERE, KeptEngine, at_hand
from hpcrl.tryout.target import TriedModel, of_model, of_recipe

CHAT = """\
usage: hpcrl chat RUN | HF-DIR [--system TEXT] [--temperature T] [--max-tokens N] [--option value ...]

  A conversation in the terminal with the last checkpoint of a run, or with a Hugging Face model. The engine stays up
  for ten minutes after the last word, for the next hpcrl chat of the same model. A line in a pipe is a turn of its own.

  --system TEXT      the system message
  --temperature T    default: 1; 0 takes the likeliest token
  --max-tokens N     of an answer (default: 512)

Ctrl-C cuts an answer off; /new forgets what was said; Ctrl-D or /quit ends. Other options are those of hpcrl run, such
as --vllm-max-num-seqs."""
SERVE = """\
usage: hpcrl serve RUN | HF-DIR [--listen HOST:PORT] [--option value ...]

  The last checkpoint of a run, or a Hugging Face model, behind vLLM's OpenAI-compatible endpoint, until Ctrl-C. Every
  route asks for a key; it is in a file that only you can read, and the lines that are printed use it.

  --listen HOST:PORT   where (default: a free port of 127.0.0.1)"""
TRY = """\
usage: hpcrl try [RECIPE.toml] [--prompts N] [--responses N] [--stage NAME] [--option value ...]

  Prompts as the model gets them, token by token, with responses from the model that the recipe starts from, the reward
  of each, what the reward function said of its parts, and how long it took. Nothing is trained. The engine stays up for
  ten minutes, for the next hpcrl try with the same model and settings.

  --prompts N     how many (default: 4)
  --responses N   to each (default: 2)
  --stage NAME    of a recipe with stages (default: the last that samples)

Without a recipe it is recipe.toml of this directory. Other options are those of hpcrl run."""


def chat(argv: list[str]) -> int:
    """`hpcrl chat`."""
    flags = {"system": Kind("str"), "temperature": Kind("float"), "max-tokens": Kind("int")}
    overrides, own, word = _parsed(argv, flags, CHAT, "a run or a model")
    if word is None:
        return 0
    target = of_model(word, overrides)
    at_hand(target.options, target.folder)
    settings: dict[str, Any] = {"temperature": own.get("temperature", 1.0), "max_tokens": own.get("max-tokens", 512)}
    said = Chat(settings, own.get("system"))
    print(f"{strip_control(target.said)}: /new begins again, Ctrl-D ends", file=sys.stderr, flush=True)
    while (text := _next_line()) is not None:
        if text == "/new":
            said.forget()
        elif text:
            _answer(said, text, at_hand(target.options, target.folder))  # it may have ended meanwhile
    return 0


def _next_line() -> str | None:
    """What the user says next; None at the end."""
    try:
        text = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None
    return None if text == "/quit" else text


def _answer(said: Chat, text: str, engine: KeptEngine) -> None:
    try:
        with engine.in_use():
            for piece in said.say(text, engine.address()):
                print(strip_control(piece, lines=True), end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" ...")
    except PeerError as error:
        print(f"hpcrl: {strip_control(str(error))}", file=sys.stderr)


def serve(argv: list[str]) -> int:
    """`hpcrl serve`."""
    overrides, own, word = _parsed(argv, {"listen": Kind("str")}, SERVE, "a run or a model")
    if word is None:
        return 0
    if "listen" in own:
        split_address(own["listen"], "--listen")
    target = of_model(word, overrides)
    listen = own.get("listen") or _free()
    keys = target.folder / "serve-keys"
    rundir = prepare(target.options, listen, keys)
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    environment[KEY_TO] = str(keys / f"openai-{split_address(listen)[1]}.key")
    print(f"{strip_control(target.said)}: starting", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", PROGRAM, str(rundir.root), "--attempt", "0"]
    return os.execve(sys.executable, command, environment)  # so that a signal reaches the engine itself


def _free() -> str:
    with socket.create_server((HERE, 0)) as free:
        return f"{HERE}:{free.getsockname()[1]}"


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


def _parsed(
    argv: list[str], flags: dict[str, Kind], usage: str, what: str
) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """(options, the command's own flags, what it is given); None for the last where help was asked for, and given."""
    overrides, own, words = parse_flags(argv, flags | {"help": Kind("bool")})
    if "help" in own or "-h" in words:
        print(usage)
        return overrides, own, None
    if len(words) != 1:
        raise UsageError(f"{what} is needed" if not words else f"{len(words)} things are named", f"one:\n{usage}")
    return overrides, own, words[0]
