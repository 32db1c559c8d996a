"""`args` as functions of the user's read them: every option of the run by its name, and slime's own names; for a
function that makes a response, also what it asks the policy with.

Invariant: a copy of its own for every response: a function may set attributes and copy all of it (`deepcopy`) without
any other call seeing that.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from hpcrl.config.options import Options
from hpcrl.rollout.slime_names.http import Router

#: what slime's functions read and hpcrl has no option for -> what holds here
FIXED: dict[str, Any] = {
    "ci_test": False,
    "rollout_global_dataset": True,
    "router_policy": None,
    "sglang_dp_size": 1,
    "sglang_enable_deterministic_inference": False,
    "sglang_model_routers": None,
    "sglang_router_policy": None,
    "sglang_speculative_algorithm": None,
    "use_distributed_post": False,
    "use_http2": False,
    "vllm_dp_size": 1,
    "vllm_enable_deterministic_inference": False,
    "vllm_model_routers": None,
}


@dataclass
class ResponseTools:
    """What a function that makes a response is given besides options.  A copy of `args` has the same.

    Attributes:
        engine: asks the policy for tokens, a `PolicyClient`.
        tokenizer: encode, decode, render.
        base_url, api_key: of the OpenAI-compatible endpoint, for this response alone.
        evaluation: whether it is one of an evaluation.
        version: of the policy.
        messages: the prompt as chat messages.
        prompt_tokens: as the policy reads it.
    """

    engine: Any
    tokenizer: Any
    base_url: str
    api_key: str
    evaluation: bool
    version: int
    messages: list[dict[str, Any]]
    prompt_tokens: list[int]

    def __deepcopy__(self, memo: Any) -> ResponseTools:
        return self


class Arguments(argparse.Namespace):
    """The options, under slime's names too."""

    def __init__(self, options: Options) -> None:
        values = {name: getattr(options, name) for name in type(options).model_fields}
        for engine in ("sglang", "vllm"):
            values[f"{engine}_server_concurrency"] = options.rollout_server_concurrency
        words = options.rm_type
        values["rm_type"] = words[0] if isinstance(words, list) and len(words) == 1 else words
        super().__init__(**{**FIXED, **values, **options.custom})
        self._sources: tuple[Any, ...] = (options,)

    def of_response(self, tools: ResponseTools) -> Arguments:
        """A copy for one response."""
        router = Router.from_base_url(tools.base_url, tools.api_key)
        found = Arguments.__new__(Arguments)
        vars(found).update(vars(self), _sources=(tools, *self._sources))
        for engine in ("sglang", "vllm"):
            vars(found).update({f"{engine}_router_ip": router.host, f"{engine}_router_port": router.port})
        return found

    def __getattr__(self, name: str) -> Any:
        for source in vars(self).get("_sources", ()):
            if not name.startswith("_") and hasattr(source, name):
                return getattr(source, name)
        if name.endswith(("_router_ip", "_router_port")):
            raise AttributeError("no engine can be asked here: only --custom-generate-function-path may")
        raise AttributeError(f"hpcrl has no option {name}: see docs/from-slime.md")
