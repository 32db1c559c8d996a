"""The names of slime's and vime's that functions written for them import and find here, and which modules import them.

`from slime.utils.types import Sample` works in every process that loads custom functions, without slime:
`foreign_imports.py` answers it by this table.  A name in no row is Python's own ImportError when the function is
loaded, before any engine is waited for.

Invariant: a module's source is read, and never run, to see what it imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from hpcrl.config.module_search import find_module, search_path
from hpcrl.utils.untrusted_files import read_given_bytes

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


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(read_given_bytes(file))
    except (OSError, SyntaxError, ValueError):
        return None


def _file_of(module: str) -> Path | None:
    """The Python file of a module, which is not imported for it; None if there is none."""
    where: list[str] = [*search_path()]
    parts = module.split(".")
    spec = None
    for depth in range(1, len(parts) + 1):
        spec = find_module(".".join(parts[:depth]), where, top=depth == 1)
        if spec is None or (spec.submodule_search_locations is None and depth < len(parts)):
            return None
        where = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and (spec.origin or "").endswith(".py") else None


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


def _last(node: ast.expr) -> str:
    """The last word of a dotted name, "" for what is none."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
