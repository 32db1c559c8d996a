"""The fields of dataclasses in installed packages, read from their source without importing them.

Importing Megatron-core or vLLM takes seconds and torch; their configuration classes say in plain source what they
accept.  Invariant: nothing of the package is executed, not even its __init__.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hpcrl.config.value_types import Kind, union
from hpcrl.utils.untrusted_files import read_given

_PLAIN = {
    "bool": "bool",
    "int": "int",
    "float": "float",
    "str": "str",
    "Any": "any",
    "dict": "object",
    "Dict": "object",
}
_LISTS = {"list", "List", "set", "Set", "tuple", "Tuple", "Sequence"}
_OPEN, _UNWRITABLE = Kind("any"), Kind("none")


@dataclass(frozen=True)
class Setting:
    """One field: its name and kind, its default as the source writes it, its own help, and the class it belongs to.

    Attributes:
        spellings: flag names, without dashes in front, that the field itself declares instead of its own name.
    """

    name: str
    kind: Kind
    default: str
    help: str
    owner: str
    spellings: tuple[str, ...] = ()

    @property
    def on_by_default(self) -> bool:
        """Whether it is a switch that must be turned off."""
        return self.default == "True"


@dataclass(frozen=True)
class _Module:
    """A parsed source file: its dotted name and what its top level defines or imports."""

    name: str
    path: Path
    names: dict[str, ast.stmt]


@cache
def locate(package: str) -> tuple[Path, ...]:
    """Directories of an installed top-level package, found without importing it; () if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ()
    return tuple(Path(p) for p in (spec.submodule_search_locations or ())) if spec else ()


@cache
def _module(name: str) -> _Module | None:
    package, _, rest = name.partition(".")
    for root in locate(package):
        base = root.joinpath(*rest.split(".")) if rest else root
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return _Module(name, path, dict(_top_level(ast.parse(read_given(path)).body)))
    return None


def _top_level(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _top_level(node.body)


def _find(module: _Module | None, name: str, depth: int = 8) -> tuple[_Module, ast.stmt] | None:
    """Where `name`, seen from `module`, is defined, through any chain of imports."""
    node = module.names.get(name) if module else None
    if node is None or not depth:
        return None
    if not isinstance(node, ast.ImportFrom):
        return module, node
    base = node.module or ""
    if node.level:
        here = module.name.split(".")
        keep = len(here) - node.level + (module.path.name == "__init__.py")
        base = ".".join([*here[:keep], *([node.module] if node.module else [])])
    original = next(a.name for a in node.names if (a.asname or a.name) == name)
    return _find(_module(base), original, depth - 1)


def read_fields(module: str, cls: str) -> dict[str, Setting] | None:
    """Fields of `cls` in `module` (bases not included), in order; None if the package or class is not there."""
    found = _find(_module(module), cls)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    return _fields(found[0].name, found[1].name)


@cache
def _fields(module: str, cls: str) -> dict[str, Setting]:
    source = _module(module)
    body = source.names[cls].body  # type: ignore[union-attr]
    settings = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            doc = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            help = " ".join(str(doc).split())
            settings[node.target.id] = _setting(source, node, help, cls)
    return settings


def _setting(module: _Module, node: ast.AnnAssign, help: str, cls: str) -> Setting:
    default, spellings = _default(node.value)
    setting = Setting(node.target.id, kind_of(module, node.annotation), default, help, cls, spellings)
    origin = _borrowed(module, node.value)
    if origin is None:
        return setting
    return replace(setting, default=origin.default, help=help or origin.help)


def _default(value: ast.expr | None) -> tuple[str, tuple[str, ...]]:
    """The default as source text, and the flag names of Megatron's metadata={"argparse_meta": {"arg_names": [...]}}."""
    if not isinstance(value, ast.Call):
        return (ast.unparse(value) if value else ""), ()
    given = {k.arg: k.value for k in value.keywords}
    try:
        meta: dict[str, Any] = ast.literal_eval(given["metadata"])
    except (KeyError, ValueError):
        meta = {}
    names = meta.get("argparse_meta", {}).get("arg_names", ())
    return (ast.unparse(given["default"]) if "default" in given else ""), tuple(n.lstrip("-") for n in names)


def _borrowed(module: _Module, value: ast.expr | None) -> Setting | None:
    """The field that a default of the form `Config.field` or `get_field(Config, "field")` refers to (vLLM's way)."""
    match value:
        case ast.Attribute(value=ast.Name(id=cls), attr=field):
            pass
        case ast.Call(func=ast.Name(id="get_field"), args=[ast.Name(id=cls), ast.Constant(value=str(field))]):
            pass
        case _:
            return None
    found = _find(module, cls)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    return _fields(found[0].name, found[1].name).get(field)


# ---- annotations


def kind_of(module: _Module | None, node: ast.expr) -> Kind:
    """The kind of an annotation in source; names are followed to aliases and enumerations."""
    match node:
        case ast.Constant(value=None):
            return Kind("none", optional=True)
        case ast.Constant(value=str(text)):
            return kind_of(module, ast.parse(text, mode="eval").body)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return _either([kind_of(module, left), kind_of(module, right)])
        case ast.Subscript(value=outer, slice=inner):
            return _subscript(module, ast.unparse(outer).rpartition(".")[2], inner)
        case ast.Attribute(attr="dtype"):
            return Kind("str", choices=("fp32", "bf16", "fp16", "fp8"))
        case ast.Name(id=name):
            return _named(module, name)
    return _OPEN


def _subscript(module: _Module | None, outer: str, inner: ast.expr) -> Kind:
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if outer == "Optional":
        return replace(kind_of(module, inner), optional=True)
    if outer == "Union":
        return _either([kind_of(module, part) for part in parts])
    if outer == "Literal":
        return _literal(module, parts)
    if outer in _LISTS:
        one = _either([kind_of(module, p) for p in parts if not (isinstance(p, ast.Constant) and p.value is Ellipsis)])
        return _OPEN if one.many or one.base in ("any", "none") else replace(one, many=True)
    if outer in ("dict", "Dict"):
        return Kind("object")
    return _UNWRITABLE if outer in ("Callable", "type") else _OPEN


def _either(parts: list[Kind]) -> Kind:
    kinds = [replace(p, optional=False) for p in parts if p.base != "none"]
    optional = any(p.optional for p in parts)
    return replace(union(kinds), optional=optional) if kinds else replace(_UNWRITABLE, optional=optional)


def _literal(module: _Module | None, parts: list[ast.expr]) -> Kind:
    """Literal[...], whose members may name other aliases."""
    values: list[str | int] = []
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, (str, int)):
            values.append(part.value)
        elif isinstance(part, ast.Name) and (inner := _named(module, part.id)).choices:
            values += inner.choices
        else:
            return _OPEN
    whole = all(isinstance(v, int) for v in values)
    return (
        Kind("int" if whole else "str", choices=tuple(values))
        if whole or all(isinstance(v, str) for v in values)
        else _OPEN
    )


def _named(module: _Module | None, name: str) -> Kind:
    if name in _PLAIN:
        return Kind(_PLAIN[name])
    if name in ("list", "List", "set"):
        return _OPEN
    if name in ("Callable", "ContextManager"):
        return _UNWRITABLE
    match _find(module, name):
        case (where, ast.Assign(value=value)):
            return kind_of(where, value)
        case (where, ast.AnnAssign(value=ast.expr() as value)):
            return kind_of(where, value)
        case (where, ast.ClassDef() as cls) if any("Enum" in ast.unparse(base) for base in cls.bases):
            members = [
                n.targets[0].id for n in cls.body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
            ]
            return Kind("str", choices=tuple(m for m in members if not m.startswith("_")))
    return _OPEN
