"""What the package looks like in numbers: modules, code lines, imports, functions, class names in several files.

    python -m tools.house [DIRECTORY]          # default: hpcrl

Code lines are lines that hold a token of code: blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

IMPORTS = (ast.Import, ast.ImportFrom)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
NOT_CODE = {tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Module:
    """One file.  nodes: its syntax tree, walked; lines: all of them; code: those with code; imports: those of import
    statements, of `code`."""

    path: Path
    tree: ast.Module
    nodes: list[ast.AST]
    lines: int
    code: int
    imports: int


def read_module(path: Path) -> Module:
    """Count a file.  SyntaxError if it is not Python."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    covered: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            covered.update(range(token.start[0], token.end[0] + 1))
    covered -= {line for node in docstrings(nodes) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    imports = [n for n in nodes if isinstance(n, IMPORTS)]
    taken = {line for node in imports for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return Module(path, tree, nodes, text.count("\n"), len(covered), len(taken & covered))


def docstrings(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """The docstrings of a module, its classes and functions."""
    for node in nodes:
        if isinstance(node, DOCUMENTED) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.value


def classes(modules: list[Module]) -> dict[str, list[Path]]:
    """Public class names that stand in several files."""
    found: dict[str, list[Path]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module.path)
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def functions(modules: list[Module]) -> list[int]:
    """Lines of every function."""
    nodes = (node for module in modules for node in module.nodes)
    return sorted((node.end_lineno or 0) - node.lineno + 1 for node in nodes if isinstance(node, FUNCTIONS))


def rooms(modules: list[Module], root: Path) -> Iterator[tuple[str, int, int]]:
    """(folder, modules, code lines) of the first floor of rooms, largest first."""
    found: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        parts = module.path.relative_to(root).parts
        found[parts[0] if len(parts) > 1 else "."].append(module)
    for name, held in sorted(found.items(), key=lambda item: -sum(m.code for m in item[1])):
        yield name, len(held), sum(m.code for m in held)


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


def main(argv: list[str]) -> None:
    """Print the table."""
    root = Path(argv[0] if argv else "hpcrl")
    files = sorted(p for p in root.rglob("*.py") if "shipped" not in p.relative_to(root).parts)
    every = [read_module(file) for file in files]
    modules = [module for module in every if module.code]
    code, sizes, lengths = sum(m.code for m in modules), sorted(m.lines for m in modules), functions(modules)
    print(f"modules with code        {len(modules)} of {len(files)}")
    print(f"lines; code              {sum(m.lines for m in modules)}; {code}")
    print(f"code lines a module      {code / len(modules):.0f}")
    print(f"module median/p90/max    {statistics.median(sizes):.0f}/{sizes[int(0.9 * len(sizes))]}/{sizes[-1]}")
    print(f"function median/p90/max  {statistics.median(lengths):.0f}/{lengths[int(0.9 * len(lengths))]}/{lengths[-1]}")
    print(f"imports, share of code   {sum(m.imports for m in modules) / code:.1%}")
    several = classes(modules)
    print(f"class names in several files  {len(several)}: {', '.join(several)}")
    for what, types in (("at run time", False), ("with types", True)):
        circles = cycles(every, root, types)
        print(f"import cycles {what:12} {len(circles)}{''.join(f'; {name}' for circle in circles for name in circle)}")
    for name, count, lines in rooms(modules, root):
        print(f"  {name:16} {count:4} modules {lines:6} code lines")


if __name__ == "__main__":
    main(sys.argv[1:])
