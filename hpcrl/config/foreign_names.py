"""The names of slime's and vime's that functions written for them import and find here.

`from slime.utils.types import Sample` works in every process that loads custom functions, without slime:
`foreign_imports.py` answers it by this table.  A name in no row is Python's own ImportError when the function is
loaded, before any engine is waited for.
"""

from __future__ import annotations

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
_TYPES = {"Sample": "helpers:Sample"}
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
