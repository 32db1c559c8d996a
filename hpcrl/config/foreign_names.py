"""The names of slime's and vime's that functions written for them import and find here, and those that a module wants
in vain.

`from slime.utils.types import Sample` works in every process that loads custom functions, without slime:
`foreign_imports.py` answers it by this table.  What is in no row is found out by reading the modules' source.

Invariant: looking runs none of the user's code.  A module whose imports are all in the table, or are those of an
installed slime, is refused for none of them; a name that is missing is told before any engine is up.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcrl.config.module_search import find_module, search_path
from hpcrl.untrusted_files import read_given_bytes

ROOTS = ("slime", "vime")  #: the packages that are answered for
_GRADERS = {
    "compute_gpqa_reward": "graders:compute_gpqa_reward",
    "f1_score": "graders:f1_score",
    "get_deepscaler_rule_based_reward": "graders:get_deepscaler_rule_based_reward",
    "grade_answer_verl": "graders:grade_answer_verl",
}
_BOXED = {
    "last_boxed_only_string": "graders:last_boxed_only_string",
    "remove_boxed": "graders:remove_boxed",
}
_ROLLOUT = {
    "GenerateState": "state:GenerateState",
    "generate": "state:generate",
    "generate_and_rm": "state:generate_and_rm",
    "generate_and_rm_group": "state:generate_and_rm_group",
    "get_model_url": "state:get_model_url",
}
_TRACES = {"trace_function": "helpers:trace_function", "trace_span": "helpers:trace_span"}
_HTTP = {"get": "http:get", "init_http_client": "http:init_http_client", "post": "http:post"}
_MISC = {"SingletonMeta": "helpers:SingletonMeta", "load_function": "helpers:load_function"}
_TYPES = {"Sample": "types:SlimeSample"}
#: module, without its first word -> its names -> MODULE:NAME, which of hpcrl/rollout/slime_names it is
MODULES: dict[str, dict[str, str]] = {
    "observability.trace_utils": _TRACES,
    "rollout.base_types": {
        "RolloutFnEvalOutput": "helpers:RolloutFnEvalOutput",
        "RolloutFnTrainOutput": "helpers:RolloutFnTrainOutput",
    },
    "rollout.data_source": {"pop_first": "helpers:pop_first"},
    "rollout.filter_hub.base_types": {"DynamicFilterOutput": "helpers:DynamicFilterOutput"},
    "rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": "helpers:check_reward_nonzero_std",
    },
    "rollout.rm_hub": _GRADERS
    | {
        "async_rm": "graders:async_rm",
        "batched_async_rm": "graders:batched_async_rm",
        "compute_score_dapo": "graders:compute_score",
        "extract_boxed_answer": "graders:extract_answer",
        "remote_rm": "graders:remote_rm",
    },
    "rollout.rm_hub.deepscaler": {"get_deepscaler_rule_based_reward": "graders:get_deepscaler_rule_based_reward"},
    "rollout.rm_hub.f1": {"f1_score": "graders:f1_score"},
    "rollout.rm_hub.gpqa": {"compute_gpqa_reward": "graders:compute_gpqa_reward"},
    "rollout.rm_hub.ifbench": {"compute_ifbench_reward": "graders:compute_ifbench_reward"},
    "rollout.rm_hub.math_dapo_utils": _BOXED | {"compute_score": "graders:compute_score"},
    "rollout.rm_hub.math_utils": _BOXED
    | {
        "extract_answer": "graders:extract_answer",
        "extract_boxed_answer": "graders:extract_answer",
        "grade_answer_mathd": "graders:same_answer",
        "grade_answer_sympy": "graders:same_answer",
        "grade_answer_verl": "graders:grade_answer_verl",
    },
    "rollout.sglang_rollout": _ROLLOUT,
    "rollout.vllm_rollout": _ROLLOUT | {"_build_inference_sampling_params": "state:as_vllm_has_them"},
    "utils.async_utils": {"run": "helpers:run"},
    "utils.core.misc": _MISC,
    "utils.core.types": _TYPES,
    "utils.http_utils": _HTTP,
    "utils.metric_utils": {
        "compute_pass_rate": "helpers:compute_pass_rate",
        "compute_statistics": "helpers:compute_statistics",
        "dict_add_prefix": "helpers:dict_add_prefix",
    },
    "utils.misc": _MISC,
    "utils.network.http_utils": _HTTP,
    "utils.processing_utils": {
        "load_processor": "helpers:load_processor",
        "load_tokenizer": "helpers:load_tokenizer",
    },
    "utils.trace_utils": _TRACES,
    "utils.types": _TYPES,
}
#: the packages that these modules lie in
PACKAGES = {name.rpartition(".")[0] for name in MODULES} | {"rollout"}
#: those by which a function drives slime's rollout
DRIVEN = ("rollout.sglang_rollout", "rollout.vllm_rollout")
MOST = 300  #: modules of the user's that are read for one function


class WantedName(NamedTuple):
    """An import of slime's or vime's.

    Attributes:
        name: as the module spells it, dotted.
        file, line: where.
    """

    name: str
    file: Path
    line: int


def has(module: str, name: str = "") -> bool:
    """Whether a module of theirs, or a name of it, is answered for."""
    rest = module.partition(".")[2]
    if not name:
        return not rest or rest in MODULES or rest in PACKAGES
    inner = f"{rest}.{name}".strip(".")
    return name in MODULES.get(rest, ()) or inner in MODULES or inner in PACKAGES


def wanted_in_vain(path: str, more: Sequence[str] = ()) -> list[WantedName]:
    """What the module of the function `path`, and the user's modules that it imports, want of slime and vime and do not
    find: imports at their top, and those inside of the function itself.

    An import whose failure the module catches is not counted, nor one that only a type checker or a program would run.

    Args:
        more: directories in which modules are looked for last.
    """
    module, _, function = path.rpartition(".")
    found: list[WantedName] = []
    seen = set(_with_packages(module))
    waiting = list(seen)
    while waiting and len(seen) <= MOST:
        name = waiting.pop()
        if (file := _own_file(name, more)) is None or (tree := _parsed(file)) is None:
            continue
        for line, target, names in _imports(tree, name, file, function if name == module else ""):
            if target.partition(".")[0] in ROOTS:
                found += _lacking(target, names, file, line)
                continue
            inner = {*_with_packages(target), *(f"{target}.{each}" for each in names)} - seen
            seen |= inner
            waiting += inner
    return found


def _with_packages(module: str) -> list[str]:
    """A module and the packages that it lies in, which are imported with it."""
    parts = module.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def drives_slime(path: str, more: Sequence[str] = ()) -> WantedName | None:
    """The import by which the module of a rollout or evaluation function drives slime's own rollout, which asks its
    data source and its router by itself; None if it has none."""
    module = path.rpartition(".")[0]
    if (file := _own_file(module, more)) is None or (tree := _parsed(file)) is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            root, _, rest = node.module.partition(".")
            if root in ROOTS and rest in DRIVEN:
                return WantedName(node.module, file, node.lineno)
    return None


def imported_roots(source: Path) -> set[str]:
    """First words of what a module's file imports, wherever in it; what it can do without is not counted."""
    tree = _parsed(source)
    return set() if tree is None else set(_roots(tree))


def written_for_slime(path: str) -> bool:
    """Whether the module of the function `path` imports anything of theirs; its source is read, and not run."""
    file = _file_of(path.rpartition(".")[0])
    return file is not None and not imported_roots(file).isdisjoint(ROOTS)


def _roots(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield (node.module or "").partition(".")[0]
    if isinstance(node, ast.With) and any(_suppresses_missing(item.context_expr) for item in node.items):
        return
    inner = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Try) and any(_catches_missing(handler) for handler in node.handlers):
        inner = [*node.handlers, *node.orelse, *node.finalbody]
    for each in inner:
        if isinstance(each, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _roots(each)


def _lacking(module: str, names: list[str], file: Path, line: int) -> list[WantedName]:
    if not has(module):
        return [] if _installed(module) else [WantedName(module, file, line)]
    if _has_own_names(module):
        return []
    absent = [name for name in names if name != "*" and not has(module, name) and not _installed(f"{module}.{name}")]
    return [WantedName(f"{module}.{name}", file, line) for name in absent]


def _has_own_names(package: str) -> bool:
    """Whether an `__init__` of the user's, or of an installed slime, may have any name of a package."""
    file = _file_of(package)
    return (
        file is not None
        and file.name == "__init__.py"
        and package.partition(".")[2] not in MODULES
        and file.stat().st_size > 0
    )


def _installed(module: str) -> bool:
    """Whether a real package has this module."""
    return _file_of(module) is not None


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(read_given_bytes(file))
    except (OSError, SyntaxError, ValueError):
        return None


def _own_file(module: str, more: Sequence[str]) -> Path | None:
    """The source of a module that is the user's: neither installed nor of Python or hpcrl."""
    if module.partition(".")[0] in {*sys.stdlib_module_names, "hpcrl"}:
        return None
    file = _file_of(module, more)
    return None if file is None or {"site-packages", "dist-packages"} & set(file.parts) else file


def _file_of(module: str, more: Sequence[str] = ()) -> Path | None:
    """The Python file of a module, which is not imported for it; None if there is none."""
    where: list[str] = [*search_path(), *more]
    parts = module.split(".")
    spec = None
    for depth in range(1, len(parts) + 1):
        spec = find_module(".".join(parts[:depth]), where, top=depth == 1)
        if spec is None or (spec.submodule_search_locations is None and depth < len(parts)):
            return None
        where = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and (spec.origin or "").endswith(".py") else None


def _imports(tree: ast.Module, module: str, file: Path, function: str) -> Iterator[tuple[int, str, list[str]]]:
    """(line, module, names) of the imports that run with a module, or with this function of it."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in _running(tree.body, function):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            if base:
                yield node.lineno, base, [alias.name for alias in node.names]


def _running(body: list[ast.stmt], function: str) -> Iterator[ast.stmt]:
    """Statements that run when their module is imported, and those of the function called so."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == function:
                yield from _running(node.body, "")
            continue
        if isinstance(node, ast.Try) and any(_catches_missing(handler) for handler in node.handlers):
            continue
        if isinstance(node, ast.With) and any(_suppresses_missing(item.context_expr) for item in node.items):
            continue
        if isinstance(node, ast.If) and _never_holds(node.test):
            yield from _running(node.orelse, function)
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from _running(getattr(node, field, None) or [], function)


def _catches_missing(handler: ast.ExceptHandler) -> bool:
    """Whether a module does without what cannot be imported."""
    if any(isinstance(node, ast.Raise) for node in ast.walk(handler)):
        return False
    return handler.type is None or _is_missing(handler.type)


def _is_missing(kinds: ast.AST) -> bool:
    """Whether an import's failure is among these exceptions."""
    names = {node.id for node in ast.walk(kinds) if isinstance(node, ast.Name)}
    return bool(names & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def _suppresses_missing(context: ast.expr) -> bool:
    """Whether it is `suppress(ImportError)`, or with another kind that includes it."""
    if not isinstance(context, ast.Call) or _last(context.func) != "suppress":
        return False
    return any(_is_missing(kind) for kind in context.args)


def _never_holds(test: ast.expr) -> bool:
    """Whether it holds for type checkers alone, or for a module that is run as a program."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
        sides = [test.left, *test.comparators]
        spelled = {side.value for side in sides if isinstance(side, ast.Constant)}
        return "__main__" in spelled and "__name__" in map(_last, sides)
    return _last(test) == "TYPE_CHECKING"


def _last(node: ast.expr) -> str:
    """The last word of a dotted name, "" for what is none."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
