"""The command lines that the documents print, taken from the texts themselves.

A command is a line of a code block (indented by four, or fenced) that begins with a program's name, perhaps after
assignments of variables; a backslash joins lines, two spaces and `#` begin a comment.  Of `--help` it is a line that is
indented by two and begins with `hpcrl`; there `[...]` may be left out and `A|B` is one or the other, so that one line
is several commands.

Invariant: no command is written down here; what a page says is what is run.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]
PROGRAMS = "hpcrl vllm make mpirun torchrun sbatch srun salloc pip python python3 bash ssh".split()
_ASSIGNMENT = re.compile(r"[A-Za-z_]+=\S*\Z")
_COMMENT = re.compile(r"(\s{2,}|^)#\s.*$")
_PYTHON = re.compile(r"```python\n# (\w+)\.py\n(.+?)```", re.DOTALL)
_HELP = re.compile(r" {2}(hpcrl .*?)(?: {2,}\S.*)?\Z")


@dataclass(frozen=True)
class Command:
    """A command as it is printed, without its comment, and where."""

    line: str
    place: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)

    @property
    def verb(self) -> str:
        """What is asked of hpcrl; "" of another program."""
        return self.words[1] if self.words[0] == "hpcrl" else ""


def printed() -> list[Command]:
    """Every command of the pages and of the heads of recipes."""
    pages = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md")), REPO / "hostfiles" / "README.md"]
    found = [command for page in pages if page.name != "options.md" for command in _of_page(page)]
    return found + [command for recipe in recipes() for command in _of_recipe(recipe)]


def python_files(page: str) -> list[tuple[str, str]]:
    """(name, text) of each block of docs/`page`.md that is a Python file: its first line is a comment with its name."""
    text = (REPO / "docs" / f"{page}.md").read_text()
    blocks = _PYTHON.findall(text)
    assert len({name for name, _ in blocks}) == len(blocks) == text.count("```python"), f"{page}: name every block"
    return blocks


def recipes() -> list[Path]:
    return sorted((REPO / "examples").rglob("*.toml"))


def _of_page(page: Path) -> Iterator[Command]:
    fenced = False
    begun = ""
    start = 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
            continue
        if not fenced and not line.startswith("    "):
            begun = ""
            continue
        text = _COMMENT.sub("", line.strip()).rstrip()
        start = start if begun else number
        begun = f"{begun} {text.removesuffix(chr(92)).strip()}".strip()
        if not text.endswith("\\"):
            if is_command(begun):
                yield Command(begun, f"{page.relative_to(REPO)}:{start}")
            begun = ""


def _of_recipe(recipe: Path) -> Iterator[Command]:
    for number, line in enumerate(recipe.read_text().splitlines(), 1):
        text = line.removeprefix("#").strip()
        if line.startswith("#   ") and is_command(text):
            yield Command(re.sub(r"\s{2,}\S.*$", "", text), f"{recipe.relative_to(REPO)}:{number}")


def is_command(text: str) -> bool:
    """Whether a line of a code block begins with a program, not with what a program printed or with prose."""
    words = text.split()
    while words and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    return len(words) > 1 and words[0].rpartition("/")[2] in PROGRAMS and not words[1].endswith(":")


def of_help(text: str, where: str) -> list[Command]:
    """Every command that a help text stands for."""
    lines = (found[1] for line in text.splitlines() if (found := _HELP.match(line)))
    return [Command(one, where) for line in lines for part in line.split("; ") for one in alternatives(part)]


def alternatives(line: str) -> list[str]:
    """A line of a synopsis as commands: the shortest, and the one with everything in brackets, for each way that `|`
    leaves."""
    line = line.replace("[--option value ...]", "")
    bare = re.sub(r"\s*\[[^]]*\]", "", line)
    full = re.sub(r"[][]", "", line)
    choices = [[word.split("|") for word in text.replace(" ...", "").split()] for text in dict.fromkeys((bare, full))]
    return [" ".join(words) for row in choices for words in itertools.product(*row)]
