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
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.config.slime.script_notes import ENVIRONMENT, missed_file, model_families, notes_of, notes_of_variables
from hpcrl.errors import UsageError
from hpcrl.sandbox.box_line import Unconfined
from hpcrl.sandbox.kinds import in_system
from hpcrl.sandbox.run import OUTPUT, RESULTS, Confined, run_confined
from hpcrl.utils.plain_text import strip_control
from hpcrl.utils.untrusted_files import read_given, read_regular

SLIME = Path(__file__).parents[1] / "config" / "slime"
SECONDS = 30.0  #: that a script may take
#: libraries that Python and its standard library load, where they lie next to it
LIBRARIES = ("python3*", "z", "ffi", "ssl", "crypto", "bz2", "lzma", "expat", "uuid", "sqlite3")
#: tools that a script may run: they compute with text
TOOLS = (
    "[ awk basename bash cat cut date dirname echo env expr false grep egrep head hostname id ls mkdir mktemp "
    "nproc paste printf pwd readlink realpath rm sed seq sort tail tee test tr true uname uniq wc whoami xargs"
)
#: commands that other tools start (env, xargs), or bash's exec: they are in PATH as scripts that note themselves down
NOTED = "python python3 ray torchrun accelerate ssh nvidia-smi pkill killall nohup timeout"
MOST_CALLS = 10_000  #: commands noted down
MOST = 1 << 20  #: bytes of one, or of a script
#: of these tools and commands, what a script that runs unconfined does not get
WRITERS = "mkdir mktemp rm tee"
FILE = "hpcrl-file"  #: a call of this name holds the path and the text of a file that the script wrote and hands over
ARRAY = "hpcrl-array"  #: a call of this name is a line of flags that ran as a command
_TRAIN = re.compile(r"(?:.*/)?(train|train_async)\.py\Z")
#: what bash says of ${NAME:?...} where nothing sets NAME, Python of os.environ["NAME"], and a script itself
_MISSING = re.compile(
    r"line \d+: (\w+): |KeyError: '(\w+)'|\b([A-Z][A-Z0-9_]+)\b(?: variable)?(?: is| must be|:)? "
    r"(?:not set|unset|not defined|required|empty|set)\b"
)


@dataclass(frozen=True)
class RunScript:
    """What a script did.

    Attributes:
        program: train.py or train_async.py.
        arguments: what it got.
        environment: what `ray job submit` would have set for it, and hpcrl does not.
        notes: what else the script did, and why that is needless.
        files: path -> text of what it wrote to its temporary directory, and hands over by its path.
    """

    program: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)


def run_script(
    path: Path,
    variables: Mapping[str, str],
    models: Path | None = None,
    seconds: float = SECONDS,
    words: Sequence[str] = (),
    trusted: bool = False,
) -> RunScript:
    """Source a script, or run a launcher in Python.

    Args:
        variables: environment variables that it gets, besides HOME and USER.
        models: where model files are that it does not find.
        words: its own command line.
        trusted: run it unconfined where it cannot be confined.

    Raises:
        UsageError: if it cannot be read or confined, does not end, fails, starts no training, or reads a file that
            is hidden from it and might set what it hands over.
    """
    text = _read(path)
    bash = _tool("bash")
    if bash is None:
        raise UsageError("bash is not here, or not in a system directory", "hpcrl import runs the script's own shell")
    with tempfile.TemporaryDirectory(prefix="hpcrl-import-") as folder:
        scratch = Path(folder)
        tools = _equip(scratch, bash)
        script = path.resolve()
        if not script.is_file():  # such as `<(command)`
            script = tools / "script.sh"
            script.write_text(text)
        line = [bash, str(script)]
        places = [str(tools), str(script), *map(str, _folders(script, models))]
        packages = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
        if path.suffix == ".py":
            python, stdlib = map(os.path.realpath, (sys.executable, sysconfig.get_path("stdlib")))
            line = [python, "-ISB", f"{tools}/launcher.py", str(script), *words]
            places += [*interpreter_files(python, stdlib, os.environ.get("HOME", "/")), *packages]
        environment = {
            "HOME": os.environ.get("HOME", "/"),
            "USER": os.environ.get("USER", ""),
            "LANG": "C.UTF-8",
            "TYPER_USE_RICH": "0",  # the last line that it writes is the error
            **variables,
            "PATH": f"{tools}/bin",
            "TMPDIR": "/tmp",
            "BASH_ENV": f"{tools}/prelude.sh",
            "HPCRL_CALLS": RESULTS,
            "HPCRL_MODELS": str(next(_models(script, models), "")),
            "HPCRL_PACKAGES": ":".join(packages),
        }
        shown = {place: place for place in places if os.path.exists(place) and not in_system(place)}
        try:
            results = str(scratch / "calls")
            said = run_confined(line, environment, seconds, tuple(shown.items()), str(script.parent), results)
        except Unconfined as error:
            if not trusted:
                hint = "run it elsewhere; with --trust-script, if you trust it; or hpcrl import -- ARGUMENTS"
                raise UsageError(f"{path} was not run: {error}", hint) from error
            for name in WRITERS.split():
                (tools / "bin" / name).unlink(missing_ok=True)
            here = {"HPCRL_CALLS": str(scratch / "calls"), "TMPDIR": folder}
            said = _run_trusted(line, {**environment, **here}, seconds, str(script.parent))
        calls = _calls(scratch / "calls")
    return _outcome(path, text, said, calls, variables, seconds)


def _outcome(
    path: Path, text: str, said: Confined, calls: list[list[str]], variables: Mapping[str, str], seconds: float
) -> RunScript:
    """What a script did, by the commands that it has noted down.

    Raises:
        UsageError: as `run_script`.
    """
    if missed := next(filter(None, map(missed_file, calls)), None):
        raise UsageError(
            f"{path} reads {strip_control(missed)}, which the sandbox hides",
            "a script sees its own directory, unless that is a home directory or /tmp: move it into one that holds "
            "what it reads as well, or name that file's directory with --models-dir",
        )
    if broken := next((call for call in calls if call[0] == ARRAY and len(call) > 2), None):
        number, flags = _first_line(text, broken[1]), strip_control(" ".join(broken[2:]))[:80]
        raise UsageError(
            f"{path} line {number}: flags ran as a command of their own: {flags}",
            "the line before it lacks a backslash at its end, so train.py does not get them",
        )
    training = [found for call in calls if (found := _training(call))]
    if not training:
        raise _no_training(path, said, seconds)
    program, arguments, told = training[0]
    environment = told or {}
    files = {call[1]: call[2] for call in calls if call[0] == FILE and len(call) == 3}
    no_json = "its --runtime-env-json is no JSON: what it sets is left out; --train-env-vars sets variables"
    notes = [no_json] if told is None else []
    others = [call for call in calls if call[0] != FILE and not _training(call)]
    notes += [*notes_of(others, environment), *notes_of_variables(text, variables, path.suffix == ".py")]
    if said.late:
        notes.append(f"it had not ended after {seconds:g} s, but started the training before")
    if said.limit:
        notes.append(f"it was ended, as it {said.limit}, but started the training before")
    if len(training) > 1:
        notes.append(f"it starts training {len(training)} times: this is the first")
    kept = {name: value for name, value in environment.items() if name not in ENVIRONMENT}
    return RunScript(program, tuple(arguments), kept, tuple(map(strip_control, notes)), files)


def _first_line(text: str, number: str) -> int:
    """The line at which a command begins; bash names a line that continues it."""
    lines, found = text.splitlines(), int(number) if number.isdecimal() else 1
    while 2 <= found <= len(lines) + 1 and lines[found - 2].endswith("\\"):
        found -= 1
    return found


def _read(path: Path) -> str:
    """The text of a script.

    Raises:
        UsageError: if it cannot be read, or bash could not make sense of its lines.
    """
    try:
        text = read_given(path, MOST)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the script {path}: {why}", "is it a run script?") from error
    if "\r\n" in text:
        raise UsageError(f"{path} has Windows line endings: bash takes them for part of a word", "fix it with dos2unix")
    return text


def _run_trusted(line: Sequence[str], environment: Mapping[str, str], seconds: float, folder: str) -> Confined:
    """Run a script unconfined; what it has started is ended with it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            line, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        texts = [(file.seek(0), file.read(OUTPUT).decode(errors="replace"))[1] for file in (out, err)]
        return Confined(process.wait(), *texts, late)


def interpreter_files(python: str, stdlib: str, home: str) -> list[str]:
    """What a Python outside the system's directories needs, and no more of where it lies: that may be a home directory.

    Raises:
        UsageError: if its standard library is a home directory, or holds it.
    """
    if os.path.realpath(home) == stdlib or os.path.realpath(home).startswith(f"{stdlib.rstrip('/')}/"):
        raise UsageError(f"{stdlib} of {python} holds your home directory", "call hpcrl with another Python")
    lib = Path(python).parent.parent / "lib"
    found = [python, stdlib, *(str(file) for name in LIBRARIES for file in sorted(lib.glob(f"lib{name}.so*")))]
    return [file for file in found if os.path.exists(file)]


def _tool(name: str) -> str | None:
    """The path of a program that every confined process sees."""
    places = ("/usr/bin:/bin:/usr/local/bin", os.environ.get("PATH", ""))
    found = (shutil.which(name, path=place) for place in places)
    return next((path for path in found if path and in_system(path)), None)


def _equip(scratch: Path, bash: str) -> Path:
    """Write what the script's bash works with: tools, those that note themselves down, names of models."""
    tools = scratch / "tools"
    for folder in (tools / "bin", tools / "models", scratch / "calls"):
        folder.mkdir(parents=True)
    for name in TOOLS.split():
        if found := _tool(name):
            (tools / "bin" / name).symlink_to(found)
    for name in NOTED.split():
        noted = f'#!{bash}\nbuiltin source "${{0%/*}}/../prelude.sh"\nhpcrl_note {name} "$@"\n'
        (tools / "bin" / name).write_text(noted)
        (tools / "bin" / name).chmod(0o755)
    for name, family in model_families().items():
        arguments = "MODEL_ARGS=()\n" if family else f"MODEL_ARGS=(--spec none {name})\n"
        (tools / "models" / f"{name}.sh").write_text(arguments)
    for name in ("prelude.sh", "launcher.py"):
        (tools / name).write_text(read_given(SLIME / name))
    return tools


def _folders(script: Path, models: Path | None) -> Iterator[Path]:
    """The directories that a script sees besides the system's: its own, and those of model arguments.

    Its own is left out where it holds more than scripts: a home directory or what is above it, and where everybody may
    write, such as /tmp.
    """
    home = Path(os.environ.get("HOME", "/")).resolve()
    own = script.parent
    if own.is_dir() and not home.is_relative_to(own) and not own.stat().st_mode & stat.S_IWOTH:
        yield own
    yield from _models(script, models)


def _models(script: Path, models: Path | None) -> Iterator[Path]:
    """Directories of model arguments: --models-dir, and that of a checkout of slime's that the script is in."""
    if models is not None and models.is_dir():
        yield models.resolve()
    for parent in script.parents[:4]:
        place = parent / "scripts" / "models"
        if place.is_dir() and place.resolve() == place:
            yield place


def _calls(folder: Path) -> list[list[str]]:
    """The commands that were noted down, in order; what a script itself has put there may be anything."""
    found = []
    for file in sorted(folder.iterdir())[:MOST_CALLS]:
        with contextlib.suppress(OSError):
            found.append(read_regular(file, MOST).decode(errors="replace").split("\0")[:-1])
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
        return UsageError(f"{path} had not ended after {seconds:g} s", "does it wait for something of a cluster's?")
    ended = f"ended with status {said.code}{': ' if said.code and last else ''}{''.join(last if said.code else ())}"
    if said.limit:
        ended = f"was ended, as it {said.limit}"
    hint = "is it a run script of slime's or vime's?"
    if missing := _MISSING.search(f"{said.out}\n{said.err}"):
        hint = f"write {next(filter(None, missing.groups()))}=VALUE after the script"
    elif path.suffix == ".py" and said.code == 2:
        hint = f"what follows -- is its own command line: hpcrl import {path} -- WORDS"
    elif path.suffix == ".py" and said.code:
        what = "install that package" if "No module named" in ended else "change that line"
        hint = f"{what}, or give its arguments: hpcrl import -- ARGUMENTS"
    if lines_of := re.findall(rf'File ".*{re.escape(path.name)}", (line \d+)', said.err):
        ended = ended.replace(":", f" at {lines_of[-1]}:", 1)
    return UsageError(f"{path} starts neither train.py nor train_async.py; it {ended}", hint)
