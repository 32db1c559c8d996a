"""Runs a launcher written in Python for `hpcrl import`, which copies this file next to the stand-ins of commands.

Python runs it as it is.  Only slime's helper for launchers (`command_utils`) is a stand-in, whose `execute_train` hands
what `train.py` would have got to bash; so is every command that the launcher starts, and bash's prelude notes it down.

Invariant: standard library alone, and nothing of hpcrl's, which the sandbox does not show.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import inspect
import itertools
import json
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: packages that ask the machine, or that the sandbox's memory does not hold: they can be imported, and no more
NOT_HERE = ("megatron", "numpy", "ray", "sglang", "torch", "transformers", "vllm", "wandb")
KEPT = ("PATH", "BASH_ENV", "TMPDIR")  #: variables that no command of the launcher may set


# ---- commands


class NotedProcess(subprocess.Popen):  # type: ignore[type-arg]
    """A command, which bash runs with the prelude in whatever environment the launcher gives it."""

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        line = args if isinstance(args, str) else shlex.join(map(str, args))
        mine = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("HPCRL_")}
        own = options.get("env")
        options.update(shell=False, executable=None, env={**(os.environ if own is None else own), **mine})
        if options.get("cwd") is not None and not os.path.isdir(options["cwd"]):
            line = f"cd {shlex.quote(str(options.pop('cwd')))}\n{line}"
        super().__init__(["bash", "-c", line], *more, **options)


def exec_command(command: str, capture_output: bool = False) -> str | None:
    """slime's: a command, and what it writes."""
    done = subprocess.run(command, stdout=subprocess.PIPE if capture_output else None, text=True, check=False)
    return typing.cast("str | None", done.stdout)


def noted(*words: object) -> None:
    """What is no command of its own: the prelude knows none of the name, and notes it down."""
    subprocess.run(list(map(str, words)), check=False)


_slept = itertools.count(1)


def sleep(_: float) -> None:
    """No wait is worth its time here; after so many a script waits for something that only a cluster has."""
    if next(_slept) > 100:
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
        noted("before_ray_job_submit")
    told = getattr(config, "extra_env_vars", "") or ""
    pairs = json.loads(told) if told.startswith("{") else dict(word.split("=", 1) for word in told.split())
    variables = {name: str(value) for name, value in {**(extra_env_vars or {}), **pairs}.items()}
    model = f'source "scripts/models/{megatron_model_type}.sh" && ' if megatron_model_type else ""
    exec_command(
        f"{model}ray job submit --runtime-env-json={shlex.quote(json.dumps({'env_vars': variables}))} "
        f"-- python3 {train_script} {'${MODEL_ARGS[@]}' if megatron_model_type else ''} {train_args}"
    )


def dataclass_cli(function: Any = None, env_var_prefix: str = "SLIME_SCRIPT_", **_: Any) -> Any:
    """slime's decorator: a function of one dataclass becomes a command of typer's, with a flag for each field, which an
    environment variable sets too."""
    if function is None:
        return lambda function: dataclass_cli(function, env_var_prefix)
    import typer

    kind = next(iter(typing.get_type_hints(function).values()))
    hints = typing.get_type_hints(kind)

    def option(of: inspect.Parameter) -> inspect.Parameter:
        names = [of.name, f"{env_var_prefix}{of.name.upper()}"]
        field = kind.__dataclass_fields__[of.name]
        default = of.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        return of.replace(default=default, annotation=typing.Annotated[hints[of.name], typer.Option(envvar=names)])

    def command(**values: Any) -> Any:
        return function(kind(**values))

    signature = inspect.signature(kind)
    command.__signature__ = signature.replace(parameters=map(option, signature.parameters.values()))  # type: ignore[attr-defined,arg-type]
    command.__doc__, command.__name__ = function.__doc__, function.__name__
    return command


def save_to_temp_file(text: str, ext: str) -> str:
    """slime's: a file of settings that the arguments name."""
    place = f"{tempfile.gettempdir()}/{time.time_ns()}.{ext}"
    Path(place).write_text(text)
    return place


HELPER = {
    "ExecuteTrainConfig": ExecuteTrainConfig,
    "GENERATION_HARDWARE": {"H100": "Hopper", "GB200": "Blackwell", "GB300": "Blackwell"},
    "NUM_GPUS_OF_HARDWARE": {"H100": 8, "GB200": 4, "GB300": 4},
    "check_has_nvlink": lambda: False,
    "convert_checkpoint": lambda model_name="", *_, **__: noted("convert_checkpoint", model_name),
    "create_run_id": lambda: time.strftime("%y%m%d-%H%M%S-000"),
    "dataclass_cli": dataclass_cli,
    "exec_command": exec_command,
    "execute_train": execute_train,
    "fp8_cast_bf16": lambda *paths, **more: noted("cp", *paths, *more.values()),
    "get_bool_env_var": lambda name, default="false": os.environ.get(name, default).lower() in ("true", "1"),
    "get_default_tracking_args": lambda *_, **__: "",
    "get_default_wandb_args": lambda *_, **__: "",
    "get_env_enable_infinite_run": lambda: False,
    "hf_download_dataset": lambda full_name: noted("hf", "download", full_name),
    "rsync_simple": lambda *paths, **more: noted("cp", *paths, *more.values()),
    "save_to_temp_file": save_to_temp_file,
}


# ---- modules


class NotHere(BaseException):
    """The launcher uses a package that it can only import here; it must not continue as if that were missing."""


class StandIn(types.ModuleType):
    """A module of slime's, with the names of its helper, or one that is not here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
            raise AttributeError(name)  # importlib looks for a submodule then
        raise NotHere(f"{self.__name__}.{name} is not known to hpcrl import")

    def refuse(self, *_: Any) -> typing.NoReturn:
        """A name that was imported is used."""
        raise NotHere(f"{self.__name__} is not known to hpcrl import")

    __bool__ = __call__ = __contains__ = __format__ = __getitem__ = __iter__ = __str__ = __eq__ = refuse  # type: ignore[assignment]
    __hash__ = types.ModuleType.__hash__  # type: ignore[assignment]


class Finder:
    """Finds stand-ins."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """slime's modules, and what is not here."""
        found = name.partition(".")[0] in ("slime", "vime", *NOT_HERE)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The stand-in."""
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Whatever the module of slime's is called, its names are those of the helper."""
        if module.__name__.startswith(("slime.", "vime.")):
            vars(module).update(HELPER)


def main() -> None:
    """Run the script; slime's own end with a proxy's variables taken out, which must be there for that."""
    script = sys.argv[1]
    del sys.argv[0]
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.setdefault(name, "")
    checkout = (folder for folder in Path(script).parents if (folder / "scripts/models").is_dir())
    HELPER["repo_base_dir"] = next(checkout, Path("/root/slime"))
    sys.path = [os.path.dirname(script), *sys.path, *os.environ["HPCRL_PACKAGES"].split(":")]
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    subprocess.Popen = NotedProcess  # type: ignore[misc]
    os.system = lambda command: subprocess.call(command)
    time.sleep = sleep
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
