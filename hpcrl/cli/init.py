"""`hpcrl init`: a folder to start from: a recipe, twenty rows of data, a reward or an agent with a test of its own, and
a README of ten lines.

Invariants: nothing that is there is overwritten, and a folder is written whole or not at all; what is written runs as
it is, from a checkout and from a wheel: it is a copy of examples/start/TASK.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from hpcrl.errors import UsageError
from hpcrl.run.rundir import write_atomic
from hpcrl.utils.arguments import Parser
from hpcrl.utils.shipped_files import shipped
from hpcrl.utils.untrusted_files import as_given, read_given

TASKS = {
    "math": "GRPO on a reward of your own",
    "tools": "GRPO with a tool that the model may ask",
    "sft": "supervised fine-tuning on answers",
    "sft-grpo": "SFT, then GRPO, on rows of your own with a held-out set",
    "dpo": "DPO on pairs of a better and a worse answer",
    "agents": "GRPO with an agent at an OpenAI-compatible endpoint",
}
START = "examples/start"
RECIPE = "recipe.toml"
_OWN_MODEL = re.compile(r"^(?P<key>\w+) = .*?  # with a model of your own: (?P<value>.*)$", re.M)
_NEEDED = ("torch", "transformers", "megatron", "vllm")  #: what the processes of a run import
_WITHOUT_ENGINES = ("sft", "dpo")


def init(argv: list[str]) -> int:
    """The command."""
    tasks = ", ".join(f"{name} ({what})" for name, what in TASKS.items())
    parser = Parser("init", "Write a folder to start from: a recipe, data, a reward with its test, a README.")
    parser.add_argument("name", metavar="NAME", help="the folder to make")
    parser.add_argument("--task", choices=list(TASKS), default="math", help=f"{tasks}; default: math")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="train this Hugging Face model; default: a tiny one with random weights, made when the run begins",
    )
    args = parser.parse_args(argv)
    folder = write_folder(Path(args.name), args.task, args.model)
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}\n")
    tests = "\n".join(f"python {path.name}" for path in sorted(folder.glob("test_*.py")))
    print(f"cd {shlex.quote(args.name)}\n{tests}\nhpcrl run")
    if lacking := not_installed(args.task):
        print(
            f"hpcrl: note: to run it, install {', '.join(lacking)}: pip install 'hpcrl[gpu]' with GPUs, "
            "make env in a checkout for CPUs (docs/install.md)",
            file=sys.stderr,
        )
    return 0


def write_folder(folder: Path, task: str, model: str | None) -> Path:
    """Make `folder` with the files of a task.

    Args:
        model: a Hugging Face directory; None: the tiny model.

    Raises:
        UsageError: if the folder is there, or cannot be made, or the model is not there.
    """
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} exists already", "give another name")
    if model is not None and not (Path(model) / "config.json").is_file():
        raise UsageError(
            f"--model {model}: there is no config.json", "name the directory of a Hugging Face model on this machine"
        )
    source = shipped(f"{START}/{task}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
            made = Path(place) / "folder"
            shutil.copytree(source, made, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            for path in made.iterdir():
                path.chmod(0o644)  # a wheel may be installed without the right to write
            own = rewritten(read_given(made / RECIPE), folder.name, task, model)
            write_atomic(made / RECIPE, own.encode())
            made.rename(folder)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}") from error
    return folder


def rewritten(recipe: str, name: str, task: str, model: str | None) -> str:
    """The text of a task's recipe for a folder of this name, and for a model."""
    text = recipe.replace(f"hpcrl run {START}/{task}/{RECIPE}", f"hpcrl run {RECIPE}")
    text = re.sub(r'^name = ".*"$', lambda _: f"name = {_quoted(name)}", text, count=1, flags=re.M)
    if model is None:
        return text
    values = {"{model}": _quoted(str(as_given(model))), "{bf16}": json.dumps(Path("/dev/nvidiactl").exists())}
    none = "# this model needs no preparation"
    line = lambda found: f"{found['key']} = {values.get(found['value'], found['value'])}"  # noqa: E731
    lines = _OWN_MODEL.sub(lambda found: none if found["value"] == "leave out" else line(found), text)
    return re.sub(r"^# the model: .*$", "# the model", lines, count=1, flags=re.M)


def _quoted(text: str) -> str:
    """A string of TOML, in which letters stay what they are."""
    return json.dumps(text, ensure_ascii=False)


def not_installed(task: str) -> list[str]:
    """The packages that a run of this task would lack here."""
    needed = [name for name in _NEEDED if name != "vllm" or task not in _WITHOUT_ENGINES]
    return [name for name in needed if importlib.util.find_spec(name) is None]
