"""Finds an estimator, loss, correction or KL estimator by the name of its file or by the dotted path of an own function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hpcrl.config.algorithm_files import Kind, algorithm_files, is_path
from hpcrl.errors import UsageError

#: kind -> the function that a file of it holds
FUNCTION = {"estimators": "estimate", "losses": "policy_loss", "corrections": "correct", "kl": "kl"}


def find(kind: Kind, name: str, option: str) -> Callable[..., Any]:
    """The function that `name` stands for.  UsageError names the option if there is none."""
    if is_path(name):
        return find_function(name, option)
    if name not in algorithm_files(kind):
        raise UsageError(f"{option} {name} is unknown", f"known: {', '.join(algorithm_files(kind))}; or module.function")
    return getattr(importlib.import_module(f"hpcrl.algorithms.{kind}.{name}"), FUNCTION[kind])


def find_function(path: str, option: str) -> Callable[..., Any]:
    """The function at a dotted path.  UsageError names the option if it cannot be imported or is not there."""
    module, _, name = path.rpartition(".")
    if not module:
        raise UsageError(f"{option} {path} is no module.function")
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise UsageError(f"{option} {path} cannot be imported: {error}", "is its directory in PYTHONPATH?") from error
    except AttributeError as error:
        raise UsageError(f"{option} {path}: {module} has no {name}") from error
    except Exception as error:  # the user's module, with whatever it does when imported
        raise UsageError(f"{option} {path}: importing {module} raises {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UsageError(f"{option} {path} is no function")
    return function
