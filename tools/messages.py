"""Every text that a user can meet, in one file, so that wordings are reviewed in one place.

    python -m tools.messages              # print it
    python -m tools.messages --write      # write tests/messages.txt, which tests compare

Texts are read from the syntax tree of hpcrl/: errors (the classes of hpcrl/errors.py and those derived from them), what
processes print (`print`, `say`) and the help of commands.  A value in a text is shown as {expression}; a text without a
word of its own is left out.  The help of options is in docs/options.md.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcrl.toolbox.imports import without_collection

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "messages.txt"
PRINTS = {"print": "print", "say": "log"}  #: functions that print, and how their texts are marked
HELPS = {"Parser", "add_argument", "add_parser", "ArgumentParser"}  #: functions that take texts of help


def text_of(node: ast.expr) -> str:
    """The text that an expression makes, its values as {expression}."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else f"{{{node.value}}}"
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{{{text_of(node.body)} | {text_of(node.orelse)}}}"
    return f"{{{ast.unparse(node)}}}"


def literal(node: ast.expr) -> bool:
    """Whether a literal of some words is in this expression."""
    return any(
        isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value.strip()
        for part in ast.walk(node)
    )


def called(node: ast.Call) -> str:
    """The last part of a called function's name."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def error_classes(trees: Mapping[Path, ast.Module]) -> set[str]:
    """Names of the classes that derive from HpcrlError."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"HpcrlError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def messages(tree: ast.Module, errors: set[str]) -> Iterator[str]:
    """The lines of one module, in the order of its code."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        name = called(node)
        kind, texts = "", []
        if name in errors:
            kind, texts = name, [*node.args, *(word.value for word in node.keywords if word.arg == "hint")]
        elif name in PRINTS:
            kind, texts = PRINTS[name], node.args
        elif name in HELPS:
            named = [word.value for word in node.keywords if word.arg in ("help", "description", "epilog")]
            kind, texts = "help", [*(node.args if name == "Parser" else []), *named]
        if any(map(literal, texts)):
            joined = "; ".join(text_of(text) for text in texts)
            yield f"{kind}: " + re.sub(r"\n", r"\\n", joined)


def page() -> str:
    """The whole file."""
    with without_collection():  # of trees that are all kept
        trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted((ROOT / "hpcrl").rglob("*.py"))}
    errors = error_classes(trees)
    lines = ["Written by `python -m tools.messages --write`.", ""]
    for path, tree in trees.items():
        if found := list(messages(tree, errors)):
            lines += [str(path.relative_to(ROOT)), *(f"  {line}" for line in found), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    elif not sys.argv[1:]:
        print(page())
    else:
        sys.exit("usage: python -m tools.messages [--write]")
