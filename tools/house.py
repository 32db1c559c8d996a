"""What the repository holds, by package, and ceilings that it must not grow past: tools/house.toml.

    python -m tools.house            # files, code lines and tokens of every part of the repository
    python -m tools.house --check    # a line for each rule that is broken; 1 if there is one
    python -m tools.house --lower    # the ceilings of house.toml that are above today's numbers, lowered to these

Code lines are lines that hold a token of code: blank lines, comments and docstrings do not count.  Of scripts, TOML and
templates they are the lines that are neither blank nor comments, and a token is a word or a sign.
Invariant: nothing here raises a ceiling.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).parent.parent
TABLE = REPO / "tools" / "house.toml"
PACKAGE = "hpcrl"
TEXTS = (".sh", ".sbatch", ".toml", ".j2")
PARTS = (
    "examples/",
    "tools/",
    "launch/",
    "sbatch/",
    "sites/",
    "bench/",
    "tests/",
)  #: what is printed beside the package
BOUNDED = (PACKAGE, "examples/", "tools/", "bench/")  #: whose modules, functions and classes have a largest size
LINES, FUNCTION, METHODS = 400, 100, 25  #: of a module, of a function, of a class
DENSER = 1.03  #: times the recorded tokens per line
MORE = 200  #: lines that examples, tools and scripts may grow by
LOW = 0.97  #: times its ceiling, below which a note says that the ceiling can be lowered
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
NOT_CODE = {tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Module:
    """One Python file.  nodes: its syntax tree, walked; lines: all of them; code: those with code; tokens: of these."""

    path: Path
    tree: ast.Module
    nodes: list[ast.AST]
    lines: int
    code: int
    tokens: int


@dataclass(frozen=True)
class Size:
    """What some files hold together."""

    files: int = 0
    code: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, counted: Iterable[tuple[int, int]]) -> Size:
        """The sum of (code lines, tokens) of files; one without code is not counted."""
        found = [one for one in counted if one[0]]
        return cls(len(found), sum(code for code, _ in found), sum(tokens for _, tokens in found))


def read_module(path: Path) -> Module:
    """Count a file.  SyntaxError if it is not Python."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    told = {line for node in docstrings(nodes) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NOT_CODE and token.start[0] not in told
    ]
    covered = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return Module(path, tree, nodes, text.count("\n"), len(covered), len(tokens))


def read_text(path: Path) -> tuple[int, int]:
    """(code lines, tokens) of a script, a TOML file or a template."""
    text = re.sub(r"\{#.*?#\}", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if line.strip() and not re.match(r"\s*#(?!SBATCH)", line)]
    return len(lines), sum(len(re.findall(r"\w+|[^\w\s]", line)) for line in lines)


def docstrings(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """The docstrings of a module, its classes and functions."""
    for node in nodes:
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0].value  # type: ignore[attr-defined]


def classes(modules: list[Module]) -> dict[str, list[Path]]:
    """Public class names that stand in several files."""
    found: dict[str, list[Path]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module.path)
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def imports_of(module: Module, names: Mapping[str, Path], types: bool) -> set[str]:
    """The modules of `names` that one imports anywhere in it; types: under TYPE_CHECKING as well."""
    left_out: set[int] = set()
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.If) and not types and "TYPE_CHECKING" in ast.unparse(node.test):
            left_out.update(id(inner) for statement in node.body for inner in ast.walk(statement))
        elif isinstance(node, ast.Import) and id(node) not in left_out:
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and id(node) not in left_out:
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in names else node.module for name in full)
    return {name for name in found if name in names and names[name] != module.path}


def cycles(modules: list[Module], root: Path, types: bool) -> list[list[str]]:
    """Modules that import one another, each circle as a sorted list; types: imports for annotations count, too."""
    names = {
        ".".join(m.path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): m for m in modules
    }
    paths = {name: module.path for name, module in names.items()}
    graph = {name: imports_of(module, paths, types) for name, module in names.items()}
    reach = {name: _reached(graph, name) for name in graph}
    circles = {frozenset({b for b in reach[a] if a in reach[b]}) for a in graph if a in reach[a]}
    return sorted(sorted(circle) for circle in circles)


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += graph[name]
    return found


def large(modules: Iterable[Module], repo: Path) -> Iterator[tuple[str, str]]:
    """(path or path:name, how large) of modules, functions and classes beyond their largest size."""
    for module in modules:
        path = str(module.path.relative_to(repo))
        if module.lines > LINES:
            yield path, f"has {module.lines} lines, {LINES} are the most"
        for node in module.nodes:
            if isinstance(node, FUNCTIONS) and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION:
                yield f"{path}:{node.name}", f"has {lines} lines, {FUNCTION} are the most"
            if isinstance(node, ast.ClassDef) and (own := sum(isinstance(x, FUNCTIONS) for x in node.body)) > METHODS:
                yield f"{path}:{node.name}", f"has {own} methods, {METHODS} are the most"


class House:
    """The files of a repository, counted.

    Attributes:
        table: house.toml.
        modules: of each folder at the top.
        sizes: of each package, of the package's files that are not Python, and of each other part.
        unmapped: what lies at the first level of the package and is of no package of the table.
    """

    def __init__(self, repo: Path = REPO, table: Path = TABLE) -> None:
        self.repo = repo
        self.table: dict[str, Any] = tomllib.loads(table.read_text(encoding="utf-8"))
        self.modules: dict[str, list[Module]] = {}
        self.sizes: dict[str, Size] = {}
        for part in (PACKAGE, *PARTS):
            self.modules[part] = [read_module(path) for path in self._files(part, (".py",))]
        home = {name: package for package, row in self.table["packages"].items() for name in row["holds"]}
        held: dict[str, list[Module]] = defaultdict(list)
        for module in self.modules[PACKAGE]:
            held[home.get(first := module.path.relative_to(repo).parts[1], f"? {first}")].append(module)
        self.unmapped = sorted(name.removeprefix("? ") for name in held if name.startswith("? "))
        self.gone = sorted(name for name in home if not (repo / PACKAGE / name).exists())
        for package in self.table["packages"]:
            self.sizes[package] = Size.of((m.code, m.tokens) for m in held[package])
        self.package = Size.of((m.code, m.tokens) for m in self.modules[PACKAGE])
        self.sizes["not Python"] = Size.of(map(read_text, self._files(PACKAGE, TEXTS)))
        for part in PARTS:
            python = [(m.code, m.tokens) for m in self.modules[part]]
            self.sizes[part] = Size.of([*python, *map(read_text, self._files(part, TEXTS))])

    def _files(self, part: str, endings: tuple[str, ...]) -> list[Path]:
        paths = (self.repo / part).rglob("*")
        return sorted(p for p in paths if p.suffix in endings and "shipped" not in p.parts and p != TABLE)

    @property
    def scripts(self) -> int:
        """Code lines of examples, tools and scripts."""
        return sum(self.sizes[part].code for part in self.table["scripts"]["holds"])

    def numbers(self) -> Iterator[tuple[str, str, float, float]]:
        """(table, key, ceiling, today) of every ceiling."""
        for package, row in self.table["packages"].items():
            yield f"packages.{package}", "code", row["code"], self.sizes[package].code
            yield f"packages.{package}", "files", row["files"], self.sizes[package].files
        whole = self.table["whole"]
        yield "whole", "code", whole["code"], self.package.code
        yield "whole", "files", whole["files"], self.package.files
        yield "whole", "not_python", whole["not_python"], self.sizes["not Python"].code
        yield "whole", "tokens_per_line", whole["tokens_per_line"], round(self.package.tokens / self.package.code, 2)
        yield "scripts", "code", self.table["scripts"]["code"], self.scripts

    def broken(self) -> Iterator[str]:
        """A line for each rule that does not hold."""
        for name in self.unmapped:
            yield f"{PACKAGE}/{name} is of no package: add it to one in tools/house.toml"
        for name in self.gone:
            yield f"{PACKAGE}/{name} is not there: remove it from tools/house.toml"
        for table, key, most, now in self.numbers():
            bound = most * DENSER if key == "tokens_per_line" else most + MORE if table == "scripts" else most
            if now > bound:
                yield f"{table}: {key} is {now}, above {bound:.6g}"
        allowed = set(self.table["large"]["allowed"])
        beyond = dict(large((m for part in BOUNDED for m in self.modules[part]), self.repo))
        yield from (f"{name} {how}" for name, how in beyond.items() if name not in allowed)
        yield from (f"{name} is no longer large: remove it from tools/house.toml" for name in allowed - set(beyond))
        for name, paths in classes(self.modules[PACKAGE]).items():
            yield f"class {name} is in {', '.join(str(path.relative_to(self.repo)) for path in paths)}"
        for circle in cycles(self.modules[PACKAGE], self.repo / PACKAGE, types=True):
            yield f"these import one another: {', '.join(circle)}"

    def show(self) -> None:
        """Print every part of the repository."""
        rows = [("", "files", "code", "tokens", "a line"), *map(_row, self.sizes.items())]
        rows.insert(len(self.table["packages"]) + 1, _row((PACKAGE, self.package)))
        for name, *numbers in rows:
            print(f"{name:12}" + "".join(f"{number:>9}" for number in numbers))


def _row(named: tuple[str, Size]) -> tuple[str, ...]:
    name, size = named
    return name, str(size.files), str(size.code), str(size.tokens), f"{size.tokens / max(1, size.code):.2f}"


def lowered(text: str, numbers: Iterable[tuple[str, str, float, float]]) -> str:
    """house.toml with today's numbers in place of ceilings above them."""
    new = {(table, key): now for table, key, most, now in numbers if now < most}
    lines = []
    table = ""
    for line in text.splitlines():
        table = line[1:-1] if re.fullmatch(r"\[[\w.]+\]", line) else table
        place = table, line.partition(" = ")[0]
        lines.append(f"{place[1]} = {new[place]}" if place in new else line)
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Print the table, or what a check finds, or lower the ceilings."""
    house = House()
    if "--lower" in argv:
        TABLE.write_text(lowered(TABLE.read_text(encoding="utf-8"), house.numbers()), encoding="utf-8")
    elif "--check" in argv:
        for table, key, most, now in house.numbers():
            if now < LOW * most:
                print(f"{table}: {key} can be lowered from {most} to {now}: python -m tools.house --lower")
        found = list(house.broken())
        print(*(f"house: {line}" for line in found), sep="\n", end="\n" if found else "")
        return int(bool(found))
    else:
        house.show()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
