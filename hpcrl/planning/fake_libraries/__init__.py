"""Packages that Megatron finds on a GPU's machine and a login node lacks, as modules of their names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: settings of Megatron's that a GPU's machine can have its way with and a stand-in cannot, and their values (None: any
#: that is on): what fails with them says nothing of a run, except for what Megatron's configuration classes refuse
NOT_STOOD_IN = {
    "cpu_offloading": None,
    "fp4": None,
    "fp8": None,
    "fused_single_qkv_rope": None,
    "moe_flex_dispatcher_backend": "hybridep",
}


def not_stood_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run's settings of Megatron's that no stand-in has."""
    return {
        name: value
        for name, value in settings.items()
        if name in NOT_STOOD_IN and value and NOT_STOOD_IN[name] in (None, value)
    }
