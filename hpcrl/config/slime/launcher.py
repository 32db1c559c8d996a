"""Runs a launcher written in Python inside the sandbox of `hpcrl import`, which copies this file there, and with it
`launcher_values`, `launcher_settings` and `launcher_source`.

slime's helper for launchers (`command_utils`) is replaced: `execute_train` hands what `train.py` would have got to the
sandbox's bash, whose prelude notes it down.  Commands go to that bash too, and whatever is not in Python's standard
library, nor in the script's own directory, is replaced by stand-ins.

Invariant: standard library alone, and nothing of hpcrl's, which the sandbox does not show; what a stand-in cannot know
appears in the arguments as UNKNOWN and is never left out.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config.slime import launcher_source
from hpcrl.config.slime.launcher_settings import (
    MODELS,
    Typer,
    call,
    dataclass_cli,
    default_of,
    mark_read_by,
    plain_environment,
    read_settings,
    settings,
)
from hpcrl.config.slime.launcher_values import OF_MODULES, OURS, SCRIPT, Finder, find_spec_of_util, note, read_yaml

FILE = "hpcrl-file"  #: a call of this name holds the path and the text of a file that the script wrote and hands over
MOST_FILE = 1 << 19  #: bytes of one
KEPT = ("PATH", "BASH_ENV", "TMPDIR")  #: variables of the sandbox that no command of the launcher may set
SLEEPS = 100  #: after which a script waits for something that only a cluster has
_Popen = subprocess.Popen


# ---- commands: the sandbox's bash notes them down


def shell(command: str | Sequence[str], **options: Any) -> tuple[str, str]:
    """(stdout, stderr) of a command, of which tools of text alone run.

    Args:
        options: env, cwd and input, as subprocess.run has them; what the sandbox's bash works with stays as it is.
    """
    line = command if isinstance(command, str) else shlex.join(map(str, command))
    told = {str(name): str(value) for name, value in (options.get("env") or {}).items()}
    given = options.get("input")
    text = given.encode() if isinstance(given, str) else given
    mark_read_by(f"{line} {(text or b'').decode(errors='replace')}")
    hand_over(line)
    mine = {name: value for name, value in plain_environment().items() if name in KEPT or name.startswith("HPCRL_")}
    process = _Popen(
        ["bash", "-c", line],
        stdin=None if text is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**plain_environment(), **told, **mine},
        cwd=folder(options.get("cwd")),
    )
    out, err = process.communicate(input=text)
    sys.stderr.buffer.write(err)  # why nothing was started may be in it
    return out.decode(errors="replace"), err.decode(errors="replace")


def folder(named: Any) -> str | None:
    """A command's directory, if it is here."""
    if named is None or os.path.isdir(named):
        return None if named is None else os.fspath(named)
    note("cd", str(named))
    return None


def hand_over(line: str) -> None:
    """Note down the files that a command names and that the launcher has written: what else it sees is read-only."""
    for word in re.split(r"[\s'\"]+", line):
        path = word.partition("=")[2] if word.startswith("-") else word
        writes = path.startswith("/") and os.path.isfile(path) and os.access(path, os.W_OK)
        if writes and os.path.getsize(path) <= MOST_FILE:
            note(FILE, path, Path(path).read_text(errors="replace"))


def exec_command(command: str, capture_output: bool = False) -> str | None:
    """slime's: a command, and what it writes."""
    out, _ = shell(command)
    return out if capture_output else None


def noted_run(command: Any, *_: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
    """subprocess.run; it is unknown whether the command would have succeeded."""
    text = any(options.get(name) for name in ("text", "universal_newlines", "encoding"))
    out, err = (part if text else part.encode() for part in shell(command, **options))
    return subprocess.CompletedProcess(command, 0, out, err)


class NotedProcess:
    """subprocess.Popen: a command that has ended already."""

    pid, returncode, stdin, stdout, stderr = 2, 0, None, (), ()

    def __init__(self, command: Any, *_: Any, **options: Any) -> None:
        self._done = noted_run(command, **options)
        self.args, self._options = command, options

    def communicate(self, input: Any = None, *_: Any, **__: Any) -> tuple[Any, Any]:
        """What it wrote; a command that gets its input now had none before."""
        if input is not None:
            self._done = noted_run(self.args, **{**self._options, "input": input})
        return self._done.stdout, self._done.stderr

    def poll(self) -> int:
        """It has ended."""
        return 0

    wait = poll

    def kill(self, *_: Any) -> None:
        """It has ended."""

    terminate = send_signal = __exit__ = kill

    def __enter__(self) -> NotedProcess:
        return self


_slept = itertools.count(1)


def sleep(_: float) -> None:
    """No wait is worth its time here; one without end ends the script."""
    if next(_slept) > SLEEPS:
        sys.exit("it waits without end")


# ---- slime's helper for launchers


@dataclasses.dataclass
class ExecuteTrainConfig:
    """slime's, whose fields the settings of a launcher inherit."""

    cuda_core_dump: bool = False
    num_nodes: int = 1
    extra_env_vars: str = ""


def execute_train(
    train_args: str,
    num_gpus_per_node: int = 0,
    megatron_model_type: str | None = None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], object] | None = None,
    extra_env_vars: Mapping[str, object] | None = None,
    config: Any = None,
    **_: Any,
) -> None:
    """Have bash put the command together, as slime's does, and note it down."""
    if before_ray_job_submit is not None:
        note("before_ray_job_submit")
    told = getattr(config, "extra_env_vars", "") or ""
    variables = {name: str(value) for name, value in (extra_env_vars or {}).items()} | pairs(told)
    model = f'{MODELS}{megatron_model_type}.sh" && ' if megatron_model_type else ""
    shell(
        f"{model}ray job submit --runtime-env-json={shlex.quote(json.dumps({'env_vars': variables}))} "
        f"-- python3 {train_script} {'${MODEL_ARGS[@]}' if megatron_model_type else ''} {train_args}"
    )


def pairs(text: str) -> dict[str, str]:
    """NAME=VALUE words, or JSON."""
    try:
        return {str(name): str(value) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        return dict(word.split("=", 1) for word in text.split() if "=" in word)


def convert_checkpoint(model_name: str = "", *_: Any, **__: Any) -> None:
    """slime's conversion of a checkpoint."""
    note("convert_checkpoint", str(model_name))


def save_to_temp_file(text: str, ext: str) -> str:
    """slime's: a file of settings that the arguments name."""
    place = f"/tmp/{time.time_ns()}.{ext}"
    Path(place).write_text(text)
    return place


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """slime's."""
    return os.environ.get(name, default).lower() in ("true", "1")


def copied(*paths: Any, **more: Any) -> None:
    """slime's copies and casts of checkpoints."""
    note("cp", *map(str, (*paths, *more.values())))


def dump(value: Any, stream: Any = None, **_: Any) -> Any:
    """yaml's: JSON is YAML too."""
    text = json.dumps(value, indent=1)
    return text if stream is None else stream.write(text)


# ---- what replaces what

OF_MODULES.update(
    {
        "fire": {"Fire": call},
        "tyro": {"cli": lambda wanted: settings(wanted) if dataclasses.is_dataclass(wanted) else call(wanted)},
        "yaml": {"dump": dump, "safe_dump": dump, **dict.fromkeys(("full_load", "load", "safe_load"), read_yaml)},
    }
)
OURS.update(
    {
        "Argument": default_of,
        "ExecuteTrainConfig": ExecuteTrainConfig,
        "GENERATION_HARDWARE": {"H100": "Hopper", "GB200": "Blackwell", "GB300": "Blackwell"},
        "NUM_GPUS_OF_HARDWARE": {"H100": 8, "GB200": 4, "GB300": 4},
        "Option": default_of,
        "Typer": Typer,
        "check_has_nvlink": lambda: False,
        "convert_checkpoint": convert_checkpoint,
        "create_run_id": lambda: time.strftime("%y%m%d-%H%M%S-000"),
        "dataclass_cli": dataclass_cli,
        "exec_command": exec_command,
        "execute_train": execute_train,
        "fp8_cast_bf16": copied,
        "get_bool_env_var": get_bool_env_var,
        "get_default_tracking_args": lambda *_, **__: "",
        "get_default_wandb_args": lambda *_, **__: "",
        "get_env_enable_infinite_run": lambda: False,
        "hf_download_dataset": lambda full_name: note("hf", "download", full_name),
        "rsync_simple": copied,
        "run": call,
        "save_to_temp_file": save_to_temp_file,
    }
)


def replace() -> None:
    """Put the stand-ins in place."""
    sys.meta_path.append(Finder())
    subprocess.run = noted_run  # type: ignore[assignment]
    subprocess.Popen = NotedProcess  # type: ignore[assignment,misc]
    subprocess.call = subprocess.check_call = lambda *given, **named: noted_run(*given, **named).returncode
    subprocess.check_output = lambda *given, **named: noted_run(*given, **named).stdout
    subprocess.getoutput = lambda command, **_: shell(command)[0].rstrip("\n")
    os.system = lambda command: 0 * len(shell(command))
    os.popen = lambda command, *_: io.StringIO(shell(command)[0])  # type: ignore[assignment,misc,return-value]
    time.sleep = sleep
    importlib.util.find_spec = find_spec_of_util
    read_settings()


def main() -> None:
    """Run the script; slime's own end with a proxy's variables taken out, which must be there for that."""
    script = sys.argv[1]
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.setdefault(name, "")
    sys.argv = [script]
    SCRIPT[0] = script
    sys.path.insert(0, os.path.dirname(script))
    OURS["repo_base_dir"] = next(
        (folder for folder in Path(script).parents if (folder / "scripts/models").is_dir()), Path("/root/slime")
    )
    replace()
    launcher_source.run(script)
