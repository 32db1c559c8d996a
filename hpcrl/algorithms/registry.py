"""Finds an estimator, loss, correction or KL estimator by the name of its file or by the dotted path of an own
function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hpcrl.config.algorithm_files import Kind, algorithm_files, is_path
from hpcrl.config.custom_functions import guarded
from hpcrl.config.plugin_points import load_own
from hpcrl.errors import UsageError

#: kind -> the function that a file of it holds
FUNCTION = {"estimators": "estimate", "losses": "policy_loss", "corrections": "correct", "kl": "kl"}


def find(kind: Kind, name: str, option: str) -> Callable[..., Any]:
    """The function that `name` stands for.  UsageError names the option if there is none; so does the HpcrlError of
    what an own one raises."""
    if is_path(name):
        return guarded(load_own(option.removeprefix("--").replace("-", "_"), name), f"{option} {name}")
    if name not in algorithm_files(kind):
        raise UsageError(
            f"{option} {name} is unknown", f"known: {', '.join(algorithm_files(kind))}; or module.function"
        )
    return getattr(importlib.import_module(f"hpcrl.algorithms.{kind}.{name}"), FUNCTION[kind])
