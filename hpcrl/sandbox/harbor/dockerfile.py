"""environment/Dockerfile: of one that puts files into an image, and does no more, FROM, WORKDIR, COPY and ENV; of one
whose image was built elsewhere WORKDIR and ENV.

Invariant: an instruction that changes what a command in the image sees is done here, or is one DataError that names its
line; nothing is built.  Variables, globs, several stages and ADD are not read.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.errors import DataError
from hpcrl.sandbox.box_init import ENVIRONMENT
from hpcrl.sandbox.harbor.task_config import absolute
from hpcrl.utils.untrusted_files import read_given

#: say nothing of what a command sees that is run by itself
_WITHOUT_EFFECT = {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL"}
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_PAIR = re.compile(r"(\w+)=(.*)", re.DOTALL)
_OLD_PAIR = re.compile(r"(\w+)\s+(\S.*)")


@dataclass(frozen=True)
class Dockerfile:
    """What one says.

    Attributes:
        base: of FROM.
        workdir: an absolute path, "" without one.
        copies: (sources below environment/, target; an absolute path, which is a directory if it ends in "/").
    """

    base: str
    workdir: str = ""
    env: dict[str, str] = field(default_factory=dict)
    copies: tuple[tuple[tuple[str, ...], str], ...] = ()


def read_dockerfile(path: Path, name: str, given: Collection[str] = ()) -> Dockerfile:
    """What the Dockerfile at `path` says.

    Args:
        name: of the task, for the hint.
        given: variables that the task itself sets, whatever the Dockerfile says of them.

    Raises:
        DataError: if it has to be built, or cannot be read.
    """
    base, workdir, env, copies = "", "", dict[str, str](), []
    for line, word, rest in _instructions(path):

        def refuse(what: str, line: int = line) -> None:
            raise DataError(
                f"{path}, line {line}: {what} would need a build",
                f"build the image elsewhere, unpack it (docker export) and name its directory: {json.dumps(name)} = "
                f'"/path" in {path.parents[2] / "images.toml"}',
            )

        if word == "FROM":
            if base or len(rest.split()) != 1 or "$" in rest:
                refuse("this FROM")
            base = rest.strip()
        elif word == "WORKDIR" and "$" not in rest:
            workdir = absolute(rest.strip().strip("\"'"), workdir or "/")
        elif word == "ENV":
            env = _with_variables(env, rest, f"{path}, line {line}: ENV", given)
        elif word == "COPY":
            copies.append(_copy(rest, workdir) or refuse("this COPY"))
        elif word == "USER" and rest.strip() in ("root", "0"):
            pass
        elif word not in _WITHOUT_EFFECT:
            refuse(word)
    if not base:
        raise DataError(f"{path}: no FROM", "say which image it begins with")
    return Dockerfile(base, workdir, env, tuple(copy for copy in copies if copy))


def read_built(path: Path, given: Collection[str] = ()) -> tuple[str, dict[str, str]]:
    """(the working directory, "" where none is known, the variables) that a Dockerfile sets whose image was built
    elsewhere: what commands in the image see and no file of it holds.  Its last stage counts.

    Args:
        given: variables that the task itself sets, whatever the Dockerfile says of them.

    Raises:
        DataError: for a variable whose value depends on what only the build knew; it cannot be read.
    """
    stages: dict[str, tuple[str, dict[str, str]]] = {}
    name, workdir, env = "", "", dict[str, str]()
    for line, word, rest in _instructions(path):
        if word == "FROM":
            base, *named = [part for part in rest.split() if not part.startswith("--")] or [""]
            workdir, env = stages.get(base.lower(), ("", {}))
            name = named[-1].lower() if named else str(len(stages))
        elif word == "WORKDIR":
            said = rest.strip().strip("\"'")
            known = "$" not in said and (said.startswith("/") or workdir)
            workdir = absolute(said, workdir) if known else ""
        elif word == "ENV":
            env = _with_variables(env, rest, f"{path}, line {line}: ENV", given)
        stages[name] = workdir, env
    return workdir, env


def _with_variables(env: dict[str, str], rest: str, where: str, given: Collection[str]) -> dict[str, str]:
    """The variables after an ENV, in either of its forms: KEY=VALUE ..., or KEY and a value up to the line's end.  All
    of a line see what was set before it."""
    pairs = [_PAIR.fullmatch(part) for part in _words(rest)]
    if not pairs or not all(pairs):
        pairs = [_OLD_PAIR.fullmatch(rest)]
    if not all(pairs):
        raise DataError(f"{where} cannot be read: {rest}", "write KEY=VALUE")
    said = [(pair[1], pair[2]) for pair in pairs if pair]
    return env | {key: _expanded(value, env, f"{where} {key}") for key, value in said if key not in given}


def _expanded(value: str, env: Mapping[str, str], where: str) -> str:
    """A value with what it refers to, as far as that was set before; PATH is then that of every box."""
    known = {"PATH": ENVIRONMENT["PATH"], **env}
    expanded = _REFERENCE.sub(lambda found: known.get(found[1] or found[2], found[0]), value)
    if _REFERENCE.search(expanded) or "${" in expanded:
        raise DataError(
            f"{where} refers to what only the build of its image knows: {value}",
            "give the variable in [environment] env of task.toml, which counts more",
        )
    return expanded


def _copy(rest: str, workdir: str) -> tuple[tuple[str, ...], str] | None:
    """(sources, target) of a COPY, None of one that is not done here."""
    *sources, target = _words(rest) or [""]
    if not sources or any(set(part) & set("*?[$") or part.startswith("--") for part in (*sources, target)):
        return None
    inside = [posixpath.normpath(source.lstrip("/") or ".") for source in sources]
    if any(part == ".." or part.startswith("../") for part in inside):
        return None
    whole = absolute(target, workdir or "/")
    return tuple(inside), whole + "/" * (len(sources) > 1 or target.endswith(("/", "/.")) or target == ".")


def _words(rest: str) -> list[str]:
    """The words of an instruction, which may be written as a JSON list; none of what cannot be read."""
    try:
        found = json.loads(rest) if rest.lstrip().startswith("[") else shlex.split(rest)
    except ValueError:
        return []
    return found if isinstance(found, list) and all(isinstance(word, str) for word in found) else []


def _instructions(path: Path) -> list[tuple[int, str, str]]:
    """(line, word in capitals, what follows) of each instruction, continued lines as one."""
    try:
        text = read_given(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    found: list[tuple[int, str, str]] = []
    begun, at = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        at = at if begun else number
        begun += line.rstrip().removesuffix("\\") + " "
        if line.rstrip().endswith("\\"):
            continue
        word, _, rest = begun.strip().partition(" ")
        found.append((at, word.upper(), rest.strip()))
        begun = ""
    return found
