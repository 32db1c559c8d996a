"""environment/Dockerfile, where all that it does is to put files into an image: FROM, WORKDIR, COPY and ENV.

Invariant: an instruction that changes what a command in the image sees is done here, or is one DataError that names its
line; nothing is built.  Variables, globs, several stages and ADD are not read.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.errors import DataError
from hpcrl.untrusted_files import read_given

#: say nothing of what a command sees that is run by itself
_WITHOUT_EFFECT = {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL"}
_PAIR = re.compile(r"(\w+)=(.*)", re.DOTALL)


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


def read_dockerfile(path: Path, name: str) -> Dockerfile:
    """What the Dockerfile at `path` says.

    Args:
        name: of the task, for the hint.

    Raises:
        DataError: if it has to be built, or cannot be read.
    """
    base, workdir, env, copies = "", "", {}, []
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
            workdir = posixpath.normpath(posixpath.join("/", workdir, rest.strip().strip("\"'")))
        elif word == "ENV":
            pairs = [_PAIR.fullmatch(part) for part in _words(rest)]
            if not pairs or not all(pairs) or "$" in rest:
                refuse("this ENV")
            env |= {pair[1]: pair[2] for pair in pairs if pair}
        elif word == "COPY":
            copies.append(_copy(rest, workdir) or refuse("this COPY"))
        elif word == "USER" and rest.strip() in ("root", "0"):
            pass
        elif word not in _WITHOUT_EFFECT:
            refuse(word)
    if not base:
        raise DataError(f"{path}: no FROM", "say which image it begins with")
    return Dockerfile(base, workdir, env, tuple(copy for copy in copies if copy))


def workdir_of(path: Path) -> str:
    """The last WORKDIR of a Dockerfile whose image was built elsewhere, "" without one; relative ones are not
    followed."""
    found = [rest.strip().strip("\"'") for _, word, rest in _instructions(path) if word == "WORKDIR"]
    return posixpath.normpath(found[-1]) if found and found[-1].startswith("/") and "$" not in found[-1] else ""


def _copy(rest: str, workdir: str) -> tuple[tuple[str, ...], str] | None:
    """(sources, target) of a COPY, None of one that is not done here."""
    *sources, target = _words(rest) or [""]
    if not sources or any(set(part) & set("*?[$") or part.startswith("--") for part in (*sources, target)):
        return None
    inside = [posixpath.normpath(source.lstrip("/") or ".") for source in sources]
    if any(part == ".." or part.startswith("../") for part in inside):
        return None
    whole = posixpath.normpath(posixpath.join("/", workdir, target))
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
