"""What `hpcrl import` says of a script besides its arguments: commands that were not run, files of models, variables.

Invariant: one line for each kind of thing, with the reason why hpcrl does without it; nothing that a script wrote is
repeated with its control characters.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from hpcrl.utils.plain_text import strip_control
from hpcrl.utils.untrusted_files import read_given

HERE = Path(__file__).parent
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
    "convert_checkpoint": "--ref-load takes the Hugging Face directory too, or what hpcrl convert to-torch-dist made",
    "before_ray_job_submit": "what the launcher starts before it was not started",
    "cp": "files are copied before a run",
}
#: environment variables of `ray job submit` -> why they are needless
ENVIRONMENT = {
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


def notes_of(calls: Sequence[Sequence[str]], environment: Mapping[str, str]) -> Iterator[str]:
    """One line for each kind of command, file of a model, and variable."""
    seen: set[str] = set()
    for call in calls:
        name = call[0]
        key = " ".join(call[:2]) if name in ("ray", "source", "source-missing") else name
        if key in seen:
            continue
        seen.add(key)
        if name in ("source", "source-missing") and len(call) > 1:
            yield strip_control(_model_note(call, known=name == "source"))
        else:
            why = NEEDLESS.get(name, "it was not run")
            yield f"{strip_control(' '.join(call))[:100]}: {why}"
    yield from (f"environment {name}: {why}" for name, why in ENVIRONMENT.items() if name in environment)


def _hidden(call: Sequence[str]) -> Path | None:
    """The file that a noted `source` has not found although it is there."""
    if len(call) < 3 or call[0] not in ("source", "source-missing"):
        return None
    file = Path(call[2]) / call[1]
    return file if os.path.isfile(file) and os.access(file, os.R_OK) else None


def missed_file(call: Sequence[str]) -> str:
    """A hidden file whose settings are missed: neither of a model nor of the machine's environment; or ""."""
    file = _hidden(call)
    if file is None or file.parent.name == "models" or call[0] == "source":
        return ""
    return "" if file.resolve().is_relative_to("/etc") or file.resolve().is_relative_to("/opt") else call[1]


def _model_note(call: Sequence[str], known: bool) -> str:
    file, hidden = call[1], _hidden(call)
    found = "no such file" if hidden is None else "hidden from the script"
    if not known and hidden is not None and hidden.parent.name != "models":
        return f"source {file}: not read, as {NEEDLESS['environment']}; write NAME=VALUE after the script"
    if not known:
        where = f"{hidden.parent.resolve()} shows it" if hidden else "DIR names the directory of model arguments"
        return f"source {file}: {found}; --models-dir {where}"
    name = Path(file).stem
    family = model_families().get(name, "")
    if not family:
        return f"source {file}: {found}, and {name} belongs to no model family of hpcrl"
    return f"source {file}: {found}, and none needed: {name} is a {family} model, described by its config.json"


def notes_of_variables(text: str, variables: Mapping[str, str], launcher: bool) -> Iterator[str]:
    """Variables that were given, perhaps in vain; and those that a script of bash's reads and nothing sets."""
    unseen = [name for name in variables if name.lower().removeprefix("slime_script_") not in text.lower()]
    yield from (f"{name} does not occur in the script: only a file that it reads can use it" for name in unseen)
    code = re.sub(r"(?m)(^|\s)#.*$", "", text)
    given = {*_KNOWN.split(), *variables, *(name for found in _SET.findall(code) for name in found if name)}
    read = dict.fromkeys(name for found in _VARIABLE.findall(code) for name in found if name)
    if not launcher and (missing := [name for name in read if name not in given]):
        yield f"nothing sets {', '.join(missing)}, which it reads: they were empty; write NAME=VALUE after the script"


@cache
def model_families() -> dict[str, str]:
    """A file of slime's model arguments, without .sh -> the model_type of its family here, "" for none."""
    return tomllib.loads(read_given(HERE / "models.toml"))
