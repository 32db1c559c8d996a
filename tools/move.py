"""Move the modules of hpcrl/ as tools/move.toml says, the folders of tests/ with them, and every mention of either.

    python -m tools.move --check    # what the table leaves out; 1 if there is anything
    python -m tools.move            # move and rewrite the working tree; ruff then sorts the imports

Imports, dotted names in strings, and paths in code, tables and pages are rewritten.  Invariant: nothing is touched if
two files would land on one path.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

REPO = Path(__file__).parent.parent
TABLE = Path(__file__).with_name("move.toml")
ROOTS = ("hpcrl", "tests")
LEFT = (
    "tools/move.py",
    "tools/move.toml",
    "tests/documents/test_move.py",
    "tests/test_house.py",
    "sbom.json",
)  #: that keep the old names
#: where `folder/` and `file.py` are meant from hpcrl/, or from the folder of a table's row
INDEXES = ("docs/architecture.md", "docs/internals.md", "CONTRIBUTING.md", "tests/test_architecture.py")
WIDTH = 120
MOST = 40  #: files in a folder
DOTTED = re.compile(r"(?<![\w./-])(hpcrl|tests)((?:\\?\.[A-Za-z_]\w*)+)")
IMPORT = re.compile(r"\bfrom ((?:hpcrl|tests)[\w.]*) import (\w+)\b(?!,| as)")
SLASHED = re.compile(r"(?<![\w.-])(?:[\w-]+/)*[\w-]+(?:\.\w+|/)(?![\w/])")
FOLDER = re.compile(r"(?<![\w.-])(?:hpcrl|tests)(?:/\w+)+(?![\w/-]|\.\w)")
ROW = re.compile(r"\| \d+ \| `([\w/]+)/`")
ABOVE = re.compile(r"(?<=__file__\))((?:\.resolve\(\))?)(?:\.parents\[(\d)\]|((?:\.parent)+)\b(?!s))")


class Move:
    """Old -> new paths of files and folders, relative to the repository.

    Attributes:
        files: of hpcrl/ and tests/; "" for one that goes.
        folders: where most of a folder goes.
        made: packages without an `__init__.py` of today's, and their docstrings.
    """

    def __init__(self, tracked: list[str], table: dict[str, Any]) -> None:
        self.table = table
        self.made = {f"hpcrl/{name}/__init__.py": text for name, text in table["packages"].items()}
        self.folders: dict[str, str] = {}
        self.files = {path: self._module(path) for path in tracked if path.startswith("hpcrl/")}
        self.files |= {path: self._test(path) for path in tracked if path.startswith("tests/")}
        for path in list(self.files):
            for folder in map(str, list(PurePosixPath(path).parents)[:-2]):
                root, _, below = folder.partition("/")
                self.folders[folder] = f"{root}/{self._folder(below)}"
        self.names = {_dotted(old): _dotted(new) for old, new in {**self.folders, **self.files}.items() if new}

    def _folder(self, below: str) -> str:
        table, path = self.table["folders"], PurePosixPath(below)
        entry = next((str(folder) for folder in (path, *path.parents) if str(folder) in table), "")
        return str(PurePosixPath(table[entry], path.relative_to(entry))) if entry else below

    def _module(self, path: str) -> str:
        below = PurePosixPath(path).relative_to("hpcrl")
        new = self.table["files"].get(str(below), str(PurePosixPath(self._folder(str(below.parent)), below.name)))
        return new and f"hpcrl/{new}"

    def _test(self, path: str) -> str:
        """The test of a module follows it; any other file of a folder follows the folder."""
        below = PurePosixPath(path).relative_to("tests")
        if below.name == "__init__.py":
            new = self.files.get(f"hpcrl/{below}", f"hpcrl/{below}")
            return new.replace("hpcrl", "tests", 1)
        module = f"hpcrl/{below.parent / below.name.removeprefix('test_')}"
        if below.name.startswith("test_") and (new := self.files.get(module, "")):
            folder, _, name = new.rpartition("/")
            return f"{folder.replace('hpcrl', 'tests', 1)}/test_{name}"
        return str(PurePosixPath("tests", self._folder(str(below.parent)), below.name))

    def broken(self) -> Iterator[str]:
        """A line for each thing that the table leaves open."""
        for kind, known in (("files", self.files), ("folders", self.folders)):
            yield from (f"hpcrl/{name} is not there" for name in self.table[kind] if f"hpcrl/{name}" not in known)
        placed: dict[str, str] = {}
        for old, new in self.files.items():
            if new and placed.setdefault(new, old) != old:
                yield f"{old} and {placed[new]} would both be {new}"
        counts: dict[str, int] = {}
        for new in filter(None, self.files.values()):
            folder, _, name = new.rpartition("/")
            module = new.startswith("hpcrl/") and name.endswith(".py")
            counts[folder] = counts.get(folder, 0) + (name.startswith("test_") or (module and name != "__init__.py"))
            if module and not {f"{folder}/__init__.py"} & {*placed, *self.made}:
                yield f"{folder} has no __init__.py: [packages]"
        yield from (f"{folder} would have {count} files" for folder, count in counts.items() if count > MOST)
        first = {new.split("/")[1] for new in self.files.values() if new.startswith("hpcrl/")}
        house = tomllib.loads((REPO / "tools/house.toml").read_text())["packages"]
        kept = {*house, *house["files"]["holds"], "py.typed", "__init__.pyi"} - {"files"}
        yield from (f"hpcrl/{name} is no package of tools/house.toml" for name in sorted(first - kept))

    def name(self, dotted: str) -> str:
        """A dotted name with its longest prefix that is a module or a package replaced."""
        parts = dotted.split(".")
        for count in range(len(parts), 0, -1):
            if (new := self.names.get(".".join(parts[:count]))) is not None:
                return ".".join([new, *parts[count:]])
        return dotted

    def path(self, path: str) -> str | None:
        """The new path of a file or a folder (with its last slash); None if it is neither."""
        if path.endswith("/"):
            new = self.folders.get(path[:-1])
            return new and f"{new}/"
        return self.files.get(path) or None

    def texts(self, old: str, text: str) -> str:
        """The text of a file, rewritten."""
        if old.endswith(".py"):
            text = self._imports(text)  # what it has written is kept from the next rules by a zero byte
            text = ABOVE.sub(lambda found: self._above(found, old), text)
        text = IMPORT.sub(self._quoted, text)
        text = DOTTED.sub(lambda f: _like(f[0], self.name(f[0].replace("\\", ""))), text)
        text = FOLDER.sub(lambda found: self.folders.get(found[0], found[0]), text)
        text = "".join(self._line(line, old) for line in text.splitlines(keepends=True))
        if old == "tests/layers.toml":
            new = {folder.removeprefix("tests/"): after[6:] for folder, after in self.folders.items()}
            text = re.sub(r'(?m)(?<=^    ")[\w/]+(?=")', lambda found: new.get(found[0], found[0]), text)
        if old == "tools/house.toml":
            text = re.sub(r"\[packages\.(?!files)(\w+)\]\nholds = \[[^]]*\]", r'[packages.\1]\nholds = ["\1"]', text)
        for before, after in self.table["texts"].get(self.files.get(old, old), ()):
            text = text.replace(before, after)
        text = text.replace("\0", "")
        return _wrapped(text) if re.match(r"hpcrl/.*\.py$", old) else text

    def _quoted(self, found: re.Match[str]) -> str:
        """One module imported from its package, by code in a text: under its old name there."""
        home, _, name = self.names.get(f"{found[1]}.{found[2]}", ".").rpartition(".")
        if not home:
            return found[0]
        return f"from {_kept(home)} import {name}" + (f" as {found[2]}" if name != found[2] else "")

    def _line(self, line: str, old: str) -> str:
        row = found[1] if (found := ROW.match(line)) else ""
        return SLASHED.sub(lambda found: self._mention(found[0], old, row), line)

    def _above(self, found: re.Match[str], old: str) -> str:
        """`parents[N]` of a file that lies deeper now, where it leads out of its package."""
        up = int(found[2]) if found[2] else found[3].count(".parent") - 1
        deeper = self.files.get(old, old).count("/") - old.count("/")
        if up < max(1, old.count("/") - 1) or not deeper:
            return found[0]
        return f"{found[1]}.parents[{up + deeper}]"

    def _bases(self, old: str, row: str) -> Iterator[tuple[str, str]]:
        """(folder, the same folder afterwards) of all that a path in this file may be meant from; row: of its table."""
        if row:
            yield f"hpcrl/{row}", self.folders.get(f"hpcrl/{row}", "")
        if old.startswith(ROOTS):
            new = [*PurePosixPath(self.files.get(old) or old).parents]
            yield from zip(map(str, [*PurePosixPath(old).parents][:-1]), map(str, new), strict=False)
        yield from ((root, root) for root in ROOTS)

    def _mention(self, text: str, old: str, row: str) -> str:
        """A path in a text, from the top or from a folder that `_bases` names."""
        if found := re.fullmatch(r"(.*/|)((?:hpcrl|tests)/.+)", text):
            folder, _, name = found[2].rpartition("/")
            made = f"{self.folders.get(folder, folder)}/{name}" if name.startswith("NAME") else found[2]
            return found[1] + (self.path(found[2]) or made)
        index = old in INDEXES or (old.startswith(ROOTS) and old.endswith("/__init__.py"))
        if text.endswith("/") and not index:
            return text
        bases = list(self._bases(old, row))
        for number, (folder, after) in enumerate(bases):
            common = text.endswith("/__init__.py") or ("/" not in text and number >= len(bases) - 2)
            if (index or not common) and (new := self.path(f"{folder}/{text}")):
                if new == f"{after}/{text}" or new == f"{after}/":
                    return text
                inner = number == 0 and new.startswith(f"{after}/")
                return new.removeprefix(f"{after}/" if inner else f"{new.split('/')[0]}/")
        return text

    def _imports(self, text: str) -> str:
        """`from package import module` where the modules of a package no longer lie together, or have other names."""
        tree = ast.parse(text)
        lines = text.splitlines(keepends=True)
        renamed: dict[str, str] = {}
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module):
            package, homes = self.name(node.module), {}
            for alias in node.names:
                new = self.names.get(f"{node.module}.{alias.name}", f"{package}.{alias.name}")
                home, _, name = new.rpartition(".")
                homes.setdefault(home, []).append(f"{name} as {alias.asname}" if alias.asname else name)
                if name != alias.name and not alias.asname:
                    renamed[alias.name] = name
            straight = [f"{alias.name} as {alias.asname}" if alias.asname else alias.name for alias in node.names]
            if node.module.split(".")[0] in ROOTS and homes != {package: straight}:
                _, sign, note = lines[node.end_lineno - 1].partition("  #")
                end, start = sign + note or "\n", " " * node.col_offset
                new = "".join(f"{start}from {_kept(home)} import {', '.join(n)}{end}" for home, n in homes.items())
                lines[node.lineno - 1 : node.end_lineno] = [new, *[""] * (node.end_lineno - node.lineno)]
        for before, after in renamed.items():
            used = {n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == before}
            for number, line in enumerate(lines, 1):
                lines[number - 1] = re.sub(rf"(?<![\w.\"'/]){before}(?=[.,)])", after, line) if number in used else line
        return "".join(lines)


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _kept(dotted: str) -> str:
    return dotted.replace(".", "\0.", 1) if "." in dotted else f"{dotted}\0"


def _like(old: str, new: str) -> str:
    return new.replace(".", "\\.") if "\\." in old else new


def _wrapped(text: str) -> str:
    """Docstrings whose lines have become too long, wrapped: tables in them stay as they are."""
    lines = text.split("\n")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    strings = [n.body[0].value for n in ast.walk(ast.parse(text)) if isinstance(n, documented) and ast.get_docstring(n)]
    for string in sorted(strings, key=lambda string: -string.lineno):
        number, end = string.lineno - 1, string.end_lineno
        while number < end:
            line = lines[number]
            indent = re.match(" *", line)[0]
            cut = line.rfind(" ", 0, WIDTH + 1)
            if len(line) > WIDTH and "   " not in line.strip() and cut >= len(indent):
                lines[number], rest = line[:cut].rstrip(), indent + line[cut:].strip()
                if number + 1 < end and re.match(indent + r"[\w`(]", lines[number + 1]):
                    lines[number + 1] = f"{rest} {lines[number + 1].strip()}"
                else:
                    lines.insert(number + 1, rest)
                    end += 1
            number += 1
    return "\n".join(lines)


def read(repo: Path = REPO) -> Move:
    """The move of the files that git tracks."""
    tracked = subprocess.check_output(["git", "ls-files"], cwd=repo, text=True).split()
    return Move(tracked, tomllib.loads(TABLE.read_text()))


def apply(move: Move) -> None:
    """Rewrite every text, then move it."""
    os.chdir(REPO)
    for old in subprocess.check_output(["git", "ls-files"], text=True).split():
        path = Path(old)
        if path.is_symlink():
            target = os.path.relpath(path.resolve(), (REPO / move.files.get(old, old)).parent)
            path.unlink()
            path.symlink_to(target)
        elif old not in LEFT and b"\0" not in (data := path.read_bytes()):
            new = move.texts(old, data.decode())
            if new != data.decode():
                path.write_text(new)
    for old, new in move.files.items():
        if not new:
            subprocess.run(["git", "rm", "-qf", old], check=True)
        elif new != old:
            Path(new).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", old, new], check=True)
    for folder in sorted(move.folders, reverse=True):
        shutil.rmtree(Path(folder, "__pycache__"), ignore_errors=True)
        with contextlib.suppress(OSError):  # it holds files
            Path(folder).rmdir()
    for path, text in move.made.items():
        for made in (Path(path), Path(path.replace("hpcrl", "tests", 1))):
            if made.parent.is_dir() and not made.exists():
                made.write_text(f'"""{text}"""\n' if made == Path(path) else "")
    subprocess.run(["git", "add", "-A", *ROOTS], check=True)
    for command in (["check", "-q", "--select", "I", "--fix"], ["format", "-q"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, "."], check=True)


def main(argv: list[str]) -> int:
    """Check the table, and move."""
    move = read()
    if found := list(move.broken()):
        print(*found, sep="\n")
        return 1
    if "--check" not in argv:
        apply(move)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
