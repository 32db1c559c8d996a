"""`args` as slime's functions read them: every option of the run by its name, the router, and slime's own names.

Invariant: a copy of its own for every call: a function may set attributes and copy all of it (`deepcopy`) without any
other call seeing that.
"""

from __future__ import annotations

import argparse
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


class SlimeArguments(argparse.Namespace):
    """The options, under slime's names too."""

    def __init__(self, options: Options, router: Router | None = None) -> None:
        """Create one.

        Args:
            router: None where no engine may be asked.
        """
        values = {name: getattr(options, name) for name in type(options).model_fields}
        for engine in ("sglang", "vllm"):
            values[f"{engine}_server_concurrency"] = options.rollout_server_concurrency
            if router is not None:
                values[f"{engine}_router_ip"] = router.host
                values[f"{engine}_router_port"] = router.port
        words = options.rm_type
        values["rm_type"] = words[0] if isinstance(words, list) and len(words) == 1 else words
        values["num_engines"] = options.num_engines
        super().__init__(**{**FIXED, **values, **options.custom})

    def __getattr__(self, name: str) -> Any:
        if name.endswith(("_router_ip", "_router_port")):
            raise AttributeError("no engine can be asked here: only --custom-generate-function-path may")
        raise AttributeError(f"hpcrl has no option {name}: see docs/from-slime.md")
