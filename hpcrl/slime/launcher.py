"""Runs a launcher written in Python inside the sandbox of `hpcrl import`, which copies this file there:
`python -I -S launcher.py SCRIPT`.

slime's helper for launchers (`command_utils`) is replaced: `execute_train` hands what `train.py` would have got to the
sandbox's bash, whose prelude notes it down.  Commands go to that bash too, and whatever is not in Python's standard
library, nor in the script's own directory, is replaced by stand-ins.

Invariant: standard library alone, and nothing of hpcrl's, which the sandbox does not show; what a stand-in cannot know
appears in the arguments as UNKNOWN and is never left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.abc
import importlib.machinery
import inspect
import io
import itertools
import json
import os
import random
import runpy
import shlex
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "hpcrl-file"  #: a call of this name holds the path and the text of a file that the script wrote and hands over
MOST_FILE = 1 << 19  #: bytes of one
SLEEPS = 100  #: after which a script waits for something that only a cluster has
_Popen = subprocess.Popen


def note(*words: str) -> None:
    """Note a call down, as the prelude does."""
    place = f"{os.environ['HPCRL_CALLS']}/{time.time_ns() // 1000}-{os.getpid()}-{random.randrange(1 << 30)}"
    Path(place).write_bytes(b"".join(word.encode(errors="replace") + b"\0" for word in words))


class UnknownValue:
    """A value that only a real package could compute; as a decorator it leaves a function as it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        ours = None if name == "run" else OURS.get(name)  # a helper that was imported from its package
        return ours or UnknownValue(f"{self._name}.{name}")

    def __call__(self, *given: Any, **_: Any) -> Any:
        if len(given) == 1 and inspect.isfunction(given[0]) | inspect.isclass(given[0]):
            return given[0]
        return UnknownValue(self._name)

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self, *_: object) -> UnknownValue:
        return self

    __getitem__ = __enter__

    def __exit__(self, *_: object) -> None:
        """Nothing was entered."""

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"UNKNOWN:{self._name}"

    __repr__ = __str__


class StandIn(types.ModuleType):
    """A module that is not here."""

    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        ours = OF_MODULES.get(self.__name__, OURS)
        return ours.get(name) or UnknownValue(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each module that nothing else has found."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec:
        """Every name is found."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The stand-in."""
        return StandIn(spec.name)

    def exec_module(self, _: types.ModuleType) -> None:
        """There is nothing to execute."""


# ---- commands: the sandbox's bash notes them down


def shell(command: str | Sequence[str]) -> tuple[str, str]:
    """(stdout, stderr) of a command, of which tools of text alone run."""
    line = command if isinstance(command, str) else shlex.join(map(str, command))
    process = _Popen(["bash", "-c", line], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    sys.stderr.buffer.write(err)  # why nothing was started may be in it
    return out.decode(errors="replace"), err.decode(errors="replace")


def exec_command(command: str, capture_output: bool = False) -> str | None:
    """slime's: a command, and what it writes."""
    out, _ = shell(command)
    return out if capture_output else None


def noted_run(command: Any, *_: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
    """subprocess.run; it is unknown whether the command would have succeeded."""
    text = any(options.get(name) for name in ("text", "universal_newlines", "encoding"))
    out, err = (part if text else part.encode() for part in shell(command))
    return subprocess.CompletedProcess(command, 0, out, err)


class NotedProcess:
    """subprocess.Popen: a command that has ended already."""

    pid, returncode, stdin, stdout, stderr = 2, 0, None, (), ()

    def __init__(self, command: Any, *_: Any, **options: Any) -> None:
        self._done = noted_run(command, **options)
        self.args = command

    def communicate(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        """What it wrote."""
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
    for word in shlex.split(train_args.replace("'", " ").replace('"', " ")):
        if word.startswith("/") and os.path.isfile(word) and os.path.getsize(word) <= MOST_FILE:
            note(FILE, word, Path(word).read_text(errors="replace"))
    told = getattr(config, "extra_env_vars", "") or ""
    variables = {name: str(value) for name, value in (extra_env_vars or {}).items()} | pairs(told)
    model = f'source "scripts/models/{megatron_model_type}.sh" && ' if megatron_model_type else ""
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


# ---- settings of a launcher: a dataclass, or the parameters of a function


def field_value(text: str, kind: Any) -> Any:
    """A word of the command line as a field's type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next((part for part in typing.get_args(kind) if part is not type(None)), str)
    if kind is bool:
        return text.lower() in ("1", "true", "yes")
    return kind(text) if kind in (int, float) else text


def settings(cls: type) -> Any:
    """A dataclass with its defaults, and with what NAME=VALUE after the script says."""
    hints = typing.get_type_hints(cls)
    given = {}
    for field in dataclasses.fields(cls):
        if field.name in os.environ:
            given[field.name] = field_value(os.environ[field.name], hints.get(field.name, str))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            sys.exit(f"line 0: {field.name}: has no default")
    return cls(**given)


def call(function: Callable[..., Any]) -> Any:
    """Call a launcher's main function as its command line would without a word."""
    if getattr(function, "called_alone", False):
        return function()
    hints = typing.get_type_hints(function)
    given = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints.get(name, str)
        if dataclasses.is_dataclass(kind):
            given[name] = settings(kind)  # type: ignore[arg-type]
        elif name in os.environ:
            given[name] = field_value(os.environ[name], kind)
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            sys.exit(f"line 0: {name}: has no default")
    return function(**given)


def dataclass_cli(function: Any = None, **_: Any) -> Any:
    """slime's decorator: a function of one dataclass becomes a command."""
    if function is None:
        return dataclass_cli

    def command(*given: Any, **named: Any) -> Any:
        return function(*given, **named) if given or named else call(function)

    command.called_alone = True  # type: ignore[attr-defined]
    return command


class Typer:
    """typer's: the first command is what is called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._commands: list[Callable[..., Any]] = []

    def command(self, *_: Any, **__: Any) -> Callable[[Any], Any]:
        """The decorator."""
        return lambda function: self._commands.append(function) or function

    callback = command

    def __call__(self) -> None:
        if self._commands:
            call(self._commands[0])


def default_of(default: Any = None, *_: Any, **__: Any) -> Any:
    """typer's Option and Argument: the default."""
    return default


def parse_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> argparse.Namespace:
    """argparse's, with what NAME=VALUE after the script says as if it had been written as flags."""
    words = []
    for action in parser._actions:
        if args is None and action.dest in os.environ.get("HPCRL_GIVEN", "").split():
            value = [] if action.nargs == 0 else os.environ[action.dest].split()
            words += [*action.option_strings[-1:], *value]
    known, rest = parser.parse_known_args(words if args is None else args, namespace)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return known


OF_MODULES: dict[str, dict[str, Any]] = {
    "fire": {"Fire": call},
    "tyro": {"cli": lambda wanted: settings(wanted) if dataclasses.is_dataclass(wanted) else call(wanted)},
    "yaml": {"dump": dump, "safe_dump": dump},
}
OURS: dict[str, Any] = {
    "Argument": default_of,
    "ExecuteTrainConfig": ExecuteTrainConfig,
    "NUM_GPUS_OF_HARDWARE": {"H100": 8, "GB200": 4, "GB300": 4},
    "Option": default_of,
    "Typer": Typer,
    "check_has_nvlink": lambda: False,
    "convert_checkpoint": convert_checkpoint,
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
    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[assignment,method-assign]


def main() -> None:
    """Run the script; slime's own end with a proxy's variables taken out, which must be there for that."""
    script = sys.argv[1]
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.setdefault(name, "")
    sys.argv = [script]
    sys.path.insert(0, os.path.dirname(script))
    OURS["repo_base_dir"] = next(
        (folder for folder in Path(script).parents if (folder / "scripts/models").is_dir()), Path("/root/slime")
    )
    replace()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
