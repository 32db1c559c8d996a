"""Answers imports of slime and vime in processes that load functions written for them.

    answer_foreign_imports()        before the first function is loaded; as often as one likes

`from slime.utils.types import Sample` then works without slime.  A name in no row of the table is Python's own
ImportError when the function is loaded, before any engine is waited for.

Invariants: a module or name of the table is hpcrl's own, whether a slime is installed or not, as theirs would ask a
router that does not exist; all other modules, and what the packages' own `__init__` have, are those of an installed
slime, or of a package of the user's that is called so; nothing of ours is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ROOTS = ("slime", "vime")  #: the packages that are answered for
OURS = "hpcrl.rollout.slime_names"  #: the package that has what the table names
_GRADERS = "compute_gpqa_reward f1_score get_deepscaler_rule_based_reward grade_answer_verl"
_BOXED = "last_boxed_only_string remove_boxed"
_SAMPLING = "GenerateState generate generate_and_rm generate_and_rm_group get_model_url"
_HTTP = ("http", "get init_http_client post")
_MISC = ("helpers", "SingletonMeta load_function")
_SAMPLE = ("helpers", "Sample")
_TRACES = ("helpers", "trace_function trace_span")
#: module, without its first word -> which of OURS has its names; NAME=X where X is what ours is called
_TABLE = {
    "observability.trace_utils": _TRACES,
    "rollout.base_types": ("helpers", "RolloutFnEvalOutput RolloutFnTrainOutput"),
    "rollout.data_source": ("helpers", "pop_first"),
    "rollout.filter_hub.base_types": ("helpers", "DynamicFilterOutput"),
    "rollout.filter_hub.dynamic_sampling_filters": ("helpers", "check_reward_nonzero_std"),
    "rollout.rm_hub": (
        "graders",
        f"{_GRADERS} async_rm batched_async_rm compute_score_dapo=compute_score extract_boxed_answer=extract_answer"
        " remote_rm",
    ),
    "rollout.rm_hub.deepscaler": ("graders", "get_deepscaler_rule_based_reward"),
    "rollout.rm_hub.f1": ("graders", "f1_score"),
    "rollout.rm_hub.gpqa": ("graders", "compute_gpqa_reward"),
    "rollout.rm_hub.ifbench": ("graders", "compute_ifbench_reward"),
    "rollout.rm_hub.math_dapo_utils": ("graders", f"{_BOXED} compute_score"),
    "rollout.rm_hub.math_utils": (
        "graders",
        f"{_BOXED} extract_answer extract_boxed_answer=extract_answer grade_answer_mathd=same_answer"
        " grade_answer_sympy=same_answer grade_answer_verl",
    ),
    "rollout.sglang_rollout": ("state", _SAMPLING),
    "rollout.vllm_rollout": ("state", f"{_SAMPLING} _build_inference_sampling_params=as_vllm_has_them"),
    "utils.async_utils": ("helpers", "run"),
    "utils.core.misc": _MISC,
    "utils.core.types": _SAMPLE,
    "utils.http_utils": _HTTP,
    "utils.metric_utils": ("helpers", "compute_pass_rate compute_statistics dict_add_prefix"),
    "utils.misc": _MISC,
    "utils.network.http_utils": _HTTP,
    "utils.processing_utils": ("helpers", "load_processor load_tokenizer"),
    "utils.trace_utils": _TRACES,
    "utils.types": _SAMPLE,
}
#: module, without its first word -> its names -> MODULE:NAME of OURS
MODULES = {
    module: {word.partition("=")[0]: f"{ours}:{word.rpartition('=')[2]}" for word in names.split()}
    for module, (ours, names) in _TABLE.items()
}
#: the packages that these modules lie in
PACKAGES = {name.rpartition(".")[0] for name in MODULES} | {"rollout"}


class ForeignFinder(MetaPathFinder, Loader):
    """Finds the modules of the table, and fills them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        if root not in ROOTS or not (not rest or rest in MODULES or rest in PACKAGES):
            return None
        is_package = not rest or rest in PACKAGES
        spec = ModuleSpec(fullname, self, origin="hpcrl's own", is_package=is_package)
        real = _real(fullname, path, target) if is_package else None
        if real is not None:
            spec.submodule_search_locations = list(real.submodule_search_locations or ())
            spec.loader_state = real
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = MODULES.get(module.__name__.partition(".")[2], {})
        real = module.__spec__.loader_state if module.__spec__ is not None else None
        if real is not None and real.loader is not None and not names:  # a namespace package has no loader
            real.loader.exec_module(module)
        for name, place in names.items():
            inner, _, theirs = place.partition(":")
            setattr(module, name, getattr(importlib.import_module(f"{OURS}.{inner}"), theirs))
        if "__getattr__" in vars(module):
            return

        def missing(name: str) -> Any:
            raise AttributeError(
                f"{module.__name__} has no {name} here: hpcrl answers for {', '.join(names) or 'its submodules'}"
            )

        module.__getattr__ = missing  # type: ignore[method-assign]


def _real(package: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """An installed package of this name, as any other finder has it: editable installations have finders of their
    own."""
    finders = (finder for finder in sys.meta_path if finder is not _FINDER)
    specs = (finder.find_spec(package, path, target) for finder in finders if hasattr(finder, "find_spec"))
    found = next((spec for spec in specs if spec is not None), None)
    return found if found is not None and found.submodule_search_locations is not None else None


_FINDER = ForeignFinder()


def answer_foreign_imports() -> None:
    """From now on."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
