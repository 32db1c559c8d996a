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
from typing import Any, Literal, Optional, Union

from hpcrl.config.value_types import Kind, kind_of
from hpcrl.utils.untrusted_files import read_given

#: names in annotations -> what they stand for; each kind of list is one
_KNOWN: dict[str, Any] = {
    **{plain.__name__: plain for plain in (bool, int, float, str, dict)},
    **dict.fromkeys(("list", "List", "set", "Set", "tuple", "Tuple", "Sequence"), list),
    **dict.fromkeys(("type", "Callable", "ContextManager"), type),
    "Dict": dict,
    "Optional": Optional,
    "Union": Union,
    "Literal": Literal,
    "dtype": Literal["fp32", "bf16", "fp16", "fp8"],
}


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


@cache
def read_fields(module: str, cls: str) -> dict[str, Setting] | None:
    """Fields of `cls` in `module` (bases not included), in order; None if the package or class is not there."""
    found = _find(_module(module), cls)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    source, body, settings = found[0], found[1].body, {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            doc = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            help = " ".join(str(doc).split())
            settings[node.target.id] = _setting(source, node, help, found[1].name)
    return settings


def _setting(module: _Module, node: ast.AnnAssign, help: str, cls: str) -> Setting:
    default, spellings = _default(node.value)
    kind = kind_of(_hint(module, node.annotation))
    if kind.lone:  # Megatron also takes an expression there, such as ([0]*3+[1]*45)
        kind = Kind("any", optional=kind.optional)
    setting = Setting(node.target.id, kind, default, help, cls, spellings)
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
    return (read_fields(module.name, cls) or {}).get(field)


# ---- annotations


def _hint(module: _Module, node: ast.expr) -> Any:
    """An annotation as a type; `object` where it is unknown."""
    match node:
        case ast.Constant(value=str(text)):
            return _hint(module, ast.parse(text, mode="eval").body)
        case ast.Constant(value=value):
            return value if value in (None, ...) else object
        case ast.Name(id=name):
            return _KNOWN[name] if name in _KNOWN else _named(module, name)
        case ast.Attribute(attr=name):
            return _KNOWN.get(name, object)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return Union[_hint(module, left), _hint(module, right)]  # noqa: UP007  (of values)
        case ast.Subscript(value=outer, slice=inner):
            whole = _hint(module, outer)
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if whole is Literal:
                values = tuple(p.value if isinstance(p, ast.Constant) else _hint(module, p) for p in parts)
                return object if object in values else Literal[values]
            if whole in (list, Union, Optional):
                args = tuple(_hint(module, part) for part in parts)
                return Union[(*args, None)] if whole is Optional else whole[args]
            return whole if whole in (dict, type) else object
    return object


def _named(module: _Module, name: str) -> Any:
    """What a name of a module stands for: aliases and enumerations are followed."""
    match _find(module, name):
        case (where, ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value)):
            return _hint(where, value)
        case (_, ast.ClassDef() as cls) if any("Enum" in ast.unparse(base) for base in cls.bases):
            return Literal[tuple(name for name, _ in _top_level(cls.body) if not name.startswith("_"))]
    return object
