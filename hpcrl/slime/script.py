"""A whole run script of slime's or vime's, sourced where it can do no harm: what it hands to train.py, and what else it
does.

Of the script's commands only tools that read and write text are meant to run; all others are noted down.  A script can
get past that, with `awk 'BEGIN { system("...") }'` for one.

Invariant: what a script does harms nothing, whatever of it runs: it is in hpcrl's sandbox (`hpcrl/sandbox/`), where it
sees its own directory and model files, read-only, and a /tmp that ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.plain_text import strip_control
from hpcrl.sandbox.private_root import RESULTS, View, in_system
from hpcrl.sandbox.run import Confined, Unconfined, run_confined
from hpcrl.untrusted_files import read_given, read_regular

HERE = Path(__file__).parent
SECONDS = 30.0  #: that a script may take
#: tools that a script may run: they compute with text
TOOLS = (
    "[ awk basename bash cat cut date dirname echo env expr false grep egrep head hostname id ls mkdir mktemp "
    "nproc paste printf pwd readlink realpath rm sed seq sort tail tee test tr true uname uniq wc whoami xargs"
)
#: commands that other tools start (env, xargs), or bash's exec: they are in PATH as scripts that note themselves down
NOTED = "python python3 ray torchrun accelerate ssh nvidia-smi pkill killall nohup timeout"
#: commands noted down, bytes of one, bytes of a script
MOST_CALLS = 20_000
MOST_CALL = 1 << 20
MOST_SCRIPT = 1 << 20
_TRAIN = re.compile(r"(?:.*/)?(train|train_async)\.py\Z")
_MISSING = re.compile(r"line \d+: (\w+): ")  #: what bash says of ${NAME:?...} where nothing sets NAME
#: where things are inside; neither lies in the other, which is read-only
_TOOLS_INSIDE = "/hpcrl-import/tools"
_PIPED_INSIDE = "/hpcrl-import/script/script.sh"  #: a script that is in no file, such as `<(command)`
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_SET = re.compile(
    r"(?:^|[\s;&|(])(?:export\s+|local\s+|declare\s+(?:-\S+\s+)*|readonly\s+)?([A-Za-z_]\w*)(?:\+?=|\[\d*\]=)|\bfor\s+(\w+)\s+in\b|\b(?:read|printf\s+-v|mapfile|readarray)\s+(?:-\S+\s+)*(\w+)",
    re.M,
)
#: what bash itself sets, and the sandbox
_KNOWN = "HOME PATH PWD USER LOGNAME HOSTNAME RANDOM BASH_SOURCE BASH UID LANG OLDPWD SHELL IFS"
#: a command -> why hpcrl does without it
NEEDLESS = {
    "ray": "there is no Ray: the allocation starts and ends all processes",
    "pkill": "hpcrl ends only what it has started",
    "kill": "hpcrl ends only what it has started",
    "killall": "hpcrl ends only what it has started",
    "ssh": "the allocation, or mpirun, starts processes on other nodes",
    "sleep": "every wait has an event to wait for, and a deadline",
    "nvidia-smi": "NCCL looks for NVLink itself",
    "huggingface-cli": "model and data are fetched before a run",
    "hf": "model and data are fetched before a run",
    "pip": "the environment is made before a run",
    "unset": "",
    "environment": "the environment is made before a run",
    "cd": "there is no such directory here",
    "mkdir": "hpcrl makes the directories that it needs",
    "nohup": "a batch job outlives its terminal",
}
#: environment variables of `ray job submit` -> why they are needless
_ENVIRONMENT = {
    "PYTHONPATH": "Megatron-core is installed as a package; your own modules are found from the directory where "
    "hpcrl is called",
    "CUDA_DEVICE_MAX_CONNECTIONS": "set where tensor or context parallelism needs it",
    "NCCL_NVLS_ENABLE": "NCCL finds out itself whether there is NVLink SHARP",
    "no_proxy": "connections of the run take no proxy",
    "MASTER_ADDR": "the plan names the hosts",
    "GLOO_SOCKET_IFNAME": "the plan's network, or --interface",
    "TP_SOCKET_IFNAME": "the plan's network, or --interface",
    "NCCL_SOCKET_IFNAME": "the plan's network, or --interface",
    "PYTHONBUFFERED": "a misspelt variable that nothing reads",
    "PYTHONUNBUFFERED": "logs are written line by line",
}


@dataclass(frozen=True)
class RunScript:
    """What a script did.

    Attributes:
        program: train.py or train_async.py.
        arguments: what it got.
        environment: what `ray job submit` would have set for it, and hpcrl does not.
        notes: what else the script did, and why that is needless.
    """

    program: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...]


def run_script(
    path: Path, variables: Mapping[str, str], models: Path | None = None, seconds: float = SECONDS
) -> RunScript:
    """Source a script.

    Args:
        variables: environment variables that it gets, besides HOME and USER.
        models: where model files are that it does not find.

    Raises:
        UsageError: if it cannot be read or confined, does not end, fails, starts no training, or reads a file that
            is hidden from it and might set what it hands over.
    """
    text = _read(path)
    with tempfile.TemporaryDirectory(prefix="hpcrl-import-") as folder:
        scratch = Path(folder)
        said = _run(path, text, scratch, variables, models, seconds)
        calls = _calls(scratch / "calls")
    if missed := next(filter(None, map(_missed, calls)), None):
        raise UsageError(
            f"{path} reads {strip_control(missed)}, which is there, but which it may not see",
            "a script sees its own directory, unless that is a home directory or /tmp: move it into one that holds "
            "what it reads as well, or name that file's directory with --models-dir",
        )
    training = [found for call in calls if (found := _training(call))]
    if not training:
        raise _no_training(path, said, seconds)
    program, arguments, told = training[0]
    environment = told or {}
    notes = (
        ["its --runtime-env-json is no JSON: what it sets is left out; --train-env-vars sets variables"]
        if told is None
        else []
    )
    notes += [*_notes(calls, environment), *_unset(text, variables)]
    if said.late:
        notes.append(f"it had not ended after {seconds:g} s, but started the training before")
    if said.limit:
        notes.append(f"it was ended, as it {said.limit}, but started the training before")
    if len(training) > 1:
        notes.append(f"it starts training {len(training)} times: this is the first")
    kept = {name: value for name, value in environment.items() if name not in _ENVIRONMENT}
    return RunScript(program, tuple(arguments), kept, tuple(map(strip_control, notes)))


def _read(path: Path) -> str:
    """The text of a script.

    Raises:
        UsageError: if it cannot be read, or bash could not make sense of its lines.
    """
    try:
        text = read_given(path, MOST_SCRIPT)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the script {path}: {why}", "is it a run script?") from error
    if "\r\n" in text:
        raise UsageError(
            f"{path} has Windows line endings, which bash reads as part of each word", "fix it with dos2unix"
        )
    return text


def _run(
    path: Path, text: str, scratch: Path, variables: Mapping[str, str], models: Path | None, seconds: float
) -> Confined:
    """Have bash source `text`, which stands at `path`; what it notes down is then in `scratch`/calls.

    Raises:
        UsageError: if there is no bash, or no way to confine it.
    """
    bash = _tool("bash")
    if bash is None:
        raise UsageError("bash is not here, or not in a system directory", "hpcrl import runs the script's own shell")
    _equip(scratch, bash)
    file = path.resolve()
    script = str(file) if file.is_file() else _PIPED_INSIDE
    (scratch / "script.sh").write_text(text)
    shown = [(_TOOLS_INSIDE, str(scratch / "tools")), (script, str(scratch / "script.sh"))]
    shown += [(str(folder), str(folder)) for folder in _folders(Path(script), models) if not in_system(str(folder))]
    environment = {
        "HOME": os.environ.get("HOME", "/"),
        "USER": os.environ.get("USER", ""),
        "LANG": "C.UTF-8",
        **variables,
        "PATH": f"{_TOOLS_INSIDE}/bin",
        "TMPDIR": "/tmp",
        "BASH_ENV": f"{_TOOLS_INSIDE}/prelude.sh",
        "HPCRL_CALLS": RESULTS,
        "HPCRL_TOOLS": TOOLS,
        "HPCRL_NOTED": NOTED,
        "HPCRL_MODELS": str(models.resolve()) if models else "",
        "HPCRL_OWN_MODELS": f"{_TOOLS_INSIDE}/models",
    }
    view = View(tuple(dict(shown).items()), str(scratch / "calls"))
    try:
        return run_confined([bash, script], view, environment, seconds, os.path.dirname(script))
    except Unconfined as error:
        raise UsageError(
            f"{path} was not run: {error}",
            "run it elsewhere, or give its arguments yourself: hpcrl import -- ARGUMENTS",
        ) from error


def _tool(name: str) -> str | None:
    """The path of a program that every confined process sees."""
    places = ("/usr/bin:/bin:/usr/local/bin", os.environ.get("PATH", ""))
    found = (shutil.which(name, path=place) for place in places)
    return next((path for path in found if path and in_system(path)), None)


def _equip(scratch: Path, bash: str) -> None:
    """Write what the script's bash works with: tools, those that note themselves down, names of models."""
    tools = scratch / "tools"
    for folder in (tools / "bin", tools / "models", scratch / "calls"):
        folder.mkdir(parents=True)
    for name in TOOLS.split():
        if found := _tool(name):
            (tools / "bin" / name).symlink_to(found)
    for name in NOTED.split():
        noted = f'#!{bash}\nbuiltin source {_TOOLS_INSIDE}/prelude.sh\nhpcrl_note {name} "$@"\n'
        (tools / "bin" / name).write_text(noted)
        (tools / "bin" / name).chmod(0o755)
    for name, family in model_families().items():
        arguments = "MODEL_ARGS=()\n" if family else f"MODEL_ARGS=(--spec none {name})\n"
        (tools / "models" / f"{name}.sh").write_text(arguments)
    (tools / "prelude.sh").write_text(read_given(HERE / "prelude.sh"))


def _folders(script: Path, models: Path | None) -> Iterator[Path]:
    """The directories that a script sees besides the system's: its own, and those of model arguments.

    Its own is left out where it holds more than scripts: a home directory or what is above it, and where everybody may
    write, such as /tmp.
    """
    home = Path(os.environ.get("HOME", "/")).resolve()
    own = script.parent
    if own.is_dir() and not home.is_relative_to(own) and not own.stat().st_mode & stat.S_IWOTH:
        yield own
    for parent in script.parents[:4]:  # a checkout of slime's
        place = parent / "scripts" / "models"
        if place.is_dir() and place.resolve() == place:
            yield place
    if models is not None and models.is_dir():
        yield models.resolve()


def _calls(folder: Path) -> list[list[str]]:
    """The commands that were noted down, in order; what a script itself has put there may be anything."""
    found = []
    for file in sorted(folder.iterdir())[:MOST_CALLS]:
        with contextlib.suppress(OSError):
            found.append(read_regular(file, MOST_CALL).decode(errors="replace").split("\0")[:-1])
    return [call for call in found if call]


def _training(call: Sequence[str]) -> tuple[str, list[str], dict[str, str] | None] | None:
    """(program, its arguments, environment, None if that cannot be read) if this command starts training."""
    for place, word in enumerate(call):
        if found := _TRAIN.match(word):
            return f"{found[1]}.py", list(call[place + 1 :]), _environment(call[:place])
    return None


def _environment(words: Sequence[str]) -> dict[str, str] | None:
    """env_vars of --runtime-env-json; None if it is no JSON."""
    for place, word in enumerate(words):
        if word.startswith("--runtime-env-json"):
            text = word.partition("=")[2] or (words[place + 1] if place + 1 < len(words) else "")
            try:
                found: Any = json.loads(text).get("env_vars", {})
                return {str(name): str(value) for name, value in found.items()}
            except (ValueError, AttributeError):
                return None
    return {}


def _no_training(path: Path, said: Confined, seconds: float) -> UsageError:
    """What to say of a script that has started no training."""
    lines = [line.strip() for line in f"{said.out}\n{said.err}".splitlines()]  # errors last
    last = [strip_control(line)[:300] for line in lines if line and not line.startswith("+")][-1:]
    if said.late:
        return UsageError(
            f"{path} had not ended after {seconds:g} s", "does it wait for something that only a cluster has?"
        )
    ended = f"ended with status {said.code}"
    if said.limit:
        ended = f"was ended, as it {said.limit}"
    elif said.code and last:
        ended = f"ended with status {said.code}: {last[0]}"
    missing = _MISSING.search(f"{said.out}\n{said.err}")
    hint = f"write {missing[1]}=VALUE after the script" if missing else "is it a run script of slime's or vime's?"
    return UsageError(f"{path} starts neither train.py nor train_async.py; it {ended}", hint)


def _notes(calls: Sequence[Sequence[str]], environment: Mapping[str, str]) -> Iterator[str]:
    """One line for each kind of command, file of a model, and variable."""
    seen: set[str] = set()
    for call in calls:
        name = call[0]
        key = " ".join(call[:2]) if name in ("ray", "source", "source-missing") else name
        if key in seen or _training(call):
            continue
        seen.add(key)
        if name in ("source", "source-missing") and len(call) > 1:
            yield strip_control(_model_note(call, known=name == "source"))
        else:
            why = NEEDLESS.get(name, "it was not run")
            yield f"{strip_control(' '.join(call))[:100]}: {why}"
    yield from (f"environment {name}: {why}" for name, why in _ENVIRONMENT.items() if name in environment)


def _hidden(call: Sequence[str]) -> Path | None:
    """The file that a noted `source` has not found although it is there."""
    if len(call) < 3 or call[0] not in ("source", "source-missing"):
        return None
    file = Path(call[2]) / call[1]
    return file if os.path.isfile(file) and os.access(file, os.R_OK) else None


def _missed(call: Sequence[str]) -> str:
    """A hidden file whose settings are missed: neither of a model nor of the machine's environment; or ""."""
    file = _hidden(call)
    if file is None or file.parent.name == "models" or call[0] == "source":
        return ""
    return "" if file.resolve().is_relative_to("/etc") or file.resolve().is_relative_to("/opt") else call[1]


def _model_note(call: Sequence[str], known: bool) -> str:
    file, hidden = call[1], _hidden(call)
    found = "no such file" if hidden is None else "it is there, but the script may not see it"
    if not known and hidden is not None and hidden.parent.name != "models":
        return f"source {file}: not read, as {NEEDLESS['environment']}; write NAME=VALUE after the script"
    if not known:
        where = f"{hidden.parent.resolve()} shows it" if hidden else "DIR names the directory of model arguments"
        return f"source {file}: {found}; --models-dir {where}"
    name = Path(file).stem
    family = model_families().get(name, "")
    if not family:
        return f"source {file}: {found}, and {name} is of no family that hpcrl has"
    return f"source {file}: {found}, and none needed: {name} is a {family} model, described by its config.json"


def _unset(text: str, variables: Mapping[str, str]) -> Iterator[str]:
    """Variables that the script reads and nothing sets: they were empty."""
    code = re.sub(r"(?m)(^|\s)#.*$", "", text)
    given = {*_KNOWN.split(), *variables, *(name for found in _SET.findall(code) for name in found if name)}
    read = dict.fromkeys(name for found in _VARIABLE.findall(code) for name in found if name)
    if missing := [name for name in read if name not in given]:
        yield f"nothing sets {', '.join(missing)}, which it reads: they were empty; write NAME=VALUE after the script"


@cache
def model_families() -> dict[str, str]:
    """A file of slime's model arguments, without .sh -> the model_type of its family here, "" for none."""
    return tomllib.loads(read_given(HERE / "models.toml"))
