"""Functions and classes of the user's, by dotted path: found, and checked before anything is asked of them.

`--custom-rm-path my_rewards.brief` names the function `brief` of the module my_rewards.py, in the directory where the
run was started or in one of PYTHONPATH.  Built-ins of slime and vime are taken as ours where they are the same
(`BUILT_INS`).

Invariant: whatever is wrong with a path, its module or a signature is one UsageError that names the option; what the
user's code raises when it runs is one HpcrlError that names it, with its traceback in the log.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from hpcrl.config.module_search import listed, searched
from hpcrl.errors import HpcrlError, UsageError

T = TypeVar("T")

#: a built-in of slime's and vime's, without its first word -> what to give here; "": what is done without the option
#: anyway
BUILT_INS = {
    "backends.megatron_utils.loss.icepop_function": "icepop",
    "rollout.data_source.RolloutDataSource": "",
    "rollout.data_source.RolloutDataSourceWithBuffer": "",
    "rollout.data_source.pop_first": "pop_first",
    "rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": "check_reward_nonzero_std",
    "rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback": "check_reward_nonzero_std_with_fallback",
    "rollout.sglang_rollout.generate_rollout": "",
    "rollout.vllm_rollout.generate_rollout": "",
}
_FOREIGN = re.compile(r"(?:slime|vime)\.([\w.]+)")
TRACE = 6000  #: characters of a traceback that are kept


def is_foreign(path: str) -> bool:
    """Whether a dotted path names something of slime's or vime's."""
    return _FOREIGN.fullmatch(path) is not None


def ours(path: str, flag: str) -> str:
    """What a path of slime's or vime's is here, "" for what is done anyway; other paths as they are.

    UsageError for one of theirs that there is not: hpcrl does not have their code.
    """
    found = _FOREIGN.fullmatch(path)
    if found is None:
        return path
    if found[1] in BUILT_INS:
        return BUILT_INS[found[1]]
    near = difflib.get_close_matches(found[1], BUILT_INS, n=1, cutoff=0.9)
    hint = f"did you mean {path.partition('.')[0]}.{near[0]}?" if near else "write your own, see docs/customise.md"
    raise UsageError(f"{flag} {path} is a function of {path.partition('.')[0]}'s that hpcrl does not have", hint)


# ---- finding


def load_function(
    path: str, flag: str, parameters: Sequence[str] = (), keywords: Sequence[str] = ()
) -> Callable[..., Any]:
    """The function `path` of the option `flag`; an object that can be called will do, of a class that takes nothing one
    is made.

    parameters: what it is called with, in order; keywords: what it is given by name besides.  UsageError if there is no
    such function, or if it cannot be called with these.
    """
    found = load_object(path, flag)
    if not callable(found):
        raise UsageError(f"{flag} {path} is not a function but {short(found)}")
    function = found() if inspect.isclass(found) else found
    check_signature(function, f"{flag} {path}", parameters, keywords)
    return function


def load_class(
    path: str, flag: str, parameters: Sequence[str], methods: Mapping[str, Sequence[str]]
) -> Callable[..., Any]:
    """The class `path` of the option `flag`, or a function that makes its objects.

    parameters: what it is made with; methods: name -> what that is called with.  UsageError as `load_function`.
    """
    found = load_object(path, flag)
    if not callable(found):
        raise UsageError(f"{flag} {path} is not a class but {short(found)}")
    check_signature(found, f"{flag} {path}", parameters)
    if inspect.isclass(found):
        for name, takes in methods.items():
            if not callable(getattr(found, name, None)):
                raise UsageError(
                    f"{flag} {path} has no method {name}", f"declare it: def {name}(self, {', '.join(takes)})"
                )
            if not isinstance(inspect.getattr_static(found, name), staticmethod | classmethod):
                takes = ("self", *takes)
            check_signature(getattr(found, name), f"{flag} {path}.{name}", takes)
    return found


def load_object(path: str, flag: str) -> Any:
    """Whatever `path` names.  UsageError as `load_function`."""
    shown = f"{flag} {path}"
    module, _, name = path.rpartition(".")
    if not module:
        raise UsageError(f"{shown} is not a module.function")
    try:
        return getattr(importlib.import_module(module), name)
    except BaseException as error:  # the user's module, with whatever it does when imported
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            raise
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise UsageError(f"{shown} cannot be imported: {error}", searched()) from None
        if isinstance(error, AttributeError) and module in sys.modules and not hasattr(sys.modules[module], name):
            raise UsageError(f"{shown}: {module} has no {name}", f"it has {_functions(sys.modules[module])}") from None
        raise UsageError(
            f"{shown}: importing {module} raises {type(error).__name__}: {error}{place_of(error)}"
        ) from error


def _functions(module: ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return listed(own)


def check_signature(
    function: Callable[..., Any], shown: str, parameters: Sequence[str], keywords: Sequence[str] = ()
) -> None:
    """UsageError, which calls it `shown`, unless `function` can be called with these."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*parameters, **dict.fromkeys(keywords))
    except TypeError as error:
        name = shown.rpartition(".")[2]
        wanted = ", ".join([*parameters, *(["*", *keywords] if keywords else [])])
        raise UsageError(
            f"{shown} takes ({', '.join(signature.parameters)}): {error}", f"declare it: def {name}({wanted})"
        ) from None


def takes(function: Callable[..., Any], keyword: str) -> bool:
    """Whether `function` can be given something by the name `keyword`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(p.kind is p.VAR_KEYWORD or (p.name == keyword and p.kind in named) for p in parameters)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to wait for."""
    call = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


# ---- calling


@contextmanager
def named(shown: str) -> Iterator[None]:
    """Within, whatever the user's code raises becomes an HpcrlError that begins with `shown`; its traceback goes to
    stderr.

    shown: the option and its value, such as "--custom-rm-path my.f"; what is an HpcrlError already passes.
    """
    try:
        yield
    except (HpcrlError, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # whatever the user's code does, SystemExit included
        print(trace_of(error), file=sys.stderr, flush=True)
        raise HpcrlError(f"{shown} raised {said_of(error)}", "its traceback is in the log") from error


def guarded(function: Callable[..., T], shown: str) -> Callable[..., T]:
    """A plain function that is always called within `named`."""

    @functools.wraps(function)
    def call(*given: Any, **by_name: Any) -> T:
        with named(shown):
            return function(*given, **by_name)

    return call


async def settled(result: Awaitable[T] | T) -> T:
    """What a function returned that may be async or plain."""
    return await result if inspect.isawaitable(result) else result  # type: ignore[return-value]


def said_of(error: BaseException) -> str:
    """An error of the user's code in one line, with its place."""
    return f"{type(error).__name__}: {str(error)[:500]}{place_of(error)}"


def trace_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-TRACE:]


def place_of(error: BaseException) -> str:
    """Where it happened: the innermost line that is not of this project, the standard library or a package."""
    own = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not any(part in f.filename for part in ("/hpcrl/", "/site-packages/", "/lib/python", "<frozen"))
    ]
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name})" if own else ""


def short(value: Any) -> str:
    """A value for an error."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
