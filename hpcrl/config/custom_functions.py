"""Functions and classes of the user's, by dotted path: found without importing them, loaded, and checked before use.

`--custom-rm-path my_rewards.brief` names the function `brief` of the module my_rewards.py, in the directory where the
run was started or in one of PYTHONPATH; then in installed packages, as in `sys.path`.  Built-ins of slime and vime are
taken as ours where they are the same (`BUILT_INS`).

Invariants: looking for a function runs none of the user's code (`importlib.util.find_spec` would: it imports the
packages above a module).  Whatever is wrong with a path, its module or a signature is one UsageError that names the
option; what the user's code raises when it runs is one HpcrlError that names it, with its traceback in the log.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hpcrl.config.foreign_imports import answer_foreign_imports
from hpcrl.config.module_search import find_module, search_path
from hpcrl.errors import CodeError, HpcrlError, UsageError, is_mistake
from hpcrl.utils.untrusted_files import read_given_bytes

T = TypeVar("T")

#: a built-in of slime's and vime's, without its first word -> what to give here; "": what is done without the option
#: anyway
BUILT_INS = {
    "backends.megatron_utils.loss.icepop_function": "icepop",
    "rollout.data_source.RolloutDataSource": "",
    "rollout.data_source.RolloutDataSourceWithBuffer": "",
    "rollout.data_source.pop_first": "pop_first",
    "rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": "check_reward_nonzero_std",
    "rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback": (
        "check_reward_nonzero_std_with_fallback"
    ),
    "rollout.sglang_rollout.generate_rollout": "",
    "rollout.vllm_rollout.generate_rollout": "",
}
_FOREIGN = re.compile(r"(?:slime|vime)\.([\w.]+)")
_PACKAGE = f"{Path(__file__).parents[1]}/"
TRACE = 6000  #: characters of a traceback that are kept


def is_foreign(path: str) -> bool:
    """Whether a dotted path names something of slime's or vime's."""
    return _FOREIGN.fullmatch(path) is not None


def ours(path: str, flag: str) -> str:
    """What a path of slime's or vime's is here, "" for what is done anyway; other paths as they are.

    Raises:
        UsageError: for any other path in their code, which hpcrl does not have.
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

    Args:
        parameters: what it is called with, in order.
        keywords: what it is given by name besides.

    Raises:
        UsageError: if there is no such function, or if it cannot be called with these.
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

    Args:
        parameters: what it is made with.
        methods: name -> what that is called with.

    Raises:
        UsageError: as `load_function`.
    """
    found = load_object(path, flag)
    if not callable(found):
        raise UsageError(f"{flag} {path} is not a class but {short(found)}")
    check_signature(found, f"{flag} {path}", parameters)
    if inspect.isclass(found):
        for name, takes in methods.items():
            if not callable(method := getattr(found, name, None)) or is_async(method):
                hint = f"declare it: def {name}(self, {', '.join(takes)})"
                raise UsageError(f"{flag} {path} has no plain method {name}", hint)
            if not isinstance(inspect.getattr_static(found, name), staticmethod | classmethod):
                takes = ("self", *takes)
            check_signature(method, f"{flag} {path}.{name}", takes)
    return found


def load_object(path: str, flag: str) -> Any:
    """Whatever `path` names.

    Raises:
        UsageError: as `load_function`.
    """
    shown = f"{flag} {path}"
    module, _, name = path.rpartition(".")
    if not module:
        raise UsageError(f"{shown} is not a module.function")
    answer_foreign_imports()
    try:
        return getattr(importlib.import_module(module), name)
    except BaseException as error:  # the user's module, with whatever it does when imported
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            raise
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise UsageError(f"{shown} cannot be imported: {error}", "; ".join([searched(), *lacking(error)])) from None
        if isinstance(error, AttributeError) and module in sys.modules and not hasattr(sys.modules[module], name):
            raise UsageError(f"{shown}: {module} has no {name}", f"it has {_functions(sys.modules[module])}") from None
        raise UsageError(
            f"{shown}: importing {module} raises {type(error).__name__}: {error}{place_of(error)}",
            "; ".join(lacking(error)),
        ) from error


def lacking(error: BaseException) -> list[str]:
    """The hint for an error that may come of what the run's copies of the user's modules lack, if there are any."""
    if SNAPSHOT not in os.environ or not isinstance(error, ImportError | FileNotFoundError):
        return []
    return ["if that is not in the run's copies, hpcrl resume --live-code imports and reads it from where it is"]


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
    why, hint = unfit(signature, shown.rpartition(".")[2], parameters, keywords)
    if why:
        raise UsageError(f"{shown} {why}", hint)


#: a parameter of other frameworks' rewards -> the form, and the page that turns it into ours
FORMS = {"completions": ("TRL's form", "docs/from-slime.md"), "solution_str": ("verl's form", "docs/from-slime.md")}


def unfit(
    signature: inspect.Signature, name: str, parameters: Sequence[str], keywords: Sequence[str]
) -> tuple[str, str]:
    """Why the function `name` cannot be called with these, and what to do; two empty texts if it can."""
    taken = f"takes ({', '.join(signature.parameters)})"
    for told, (form, page) in FORMS.items():
        if "sample" in parameters and told in list(signature.parameters)[:2]:
            return f"{taken}, which is {form} of a reward", f"{page} turns it into hpcrl's"
    try:
        signature.bind(*parameters, **dict.fromkeys(keywords))
    except TypeError as error:
        wanted = ", ".join([*parameters, *(["*", *keywords] if keywords else [])])
        return f"{taken}: {error}", f"declare it: def {name}({wanted})"
    return "", ""


def written_signature(file: Path, name: str) -> inspect.Signature | None:
    """The signature of the function `name` at the top level of a module, read from its text.

    None where the text does not tell: something decorates it or binds the name again.
    """
    tree = ast.parse(read_given_bytes(file))
    found = [node for node in tree.body if getattr(node, "name", "") == name]
    found += [
        node for node in ast.walk(tree) if isinstance(node, ast.Name) and (node.id, type(node.ctx)) == (name, ast.Store)
    ]
    node = found[0] if len(found) == 1 else None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    kinds, args = inspect.Parameter, node.args
    plain = [(arg, kinds.POSITIONAL_ONLY) for arg in args.posonlyargs]
    plain += [(arg, kinds.POSITIONAL_OR_KEYWORD) for arg in args.args]
    defaults: list[Any] = [None] * (len(plain) - len(args.defaults)) + args.defaults
    made = [(*one, default) for one, default in zip(plain, defaults, strict=True)]
    made += [(args.vararg, kinds.VAR_POSITIONAL, None)] if args.vararg else []
    made += [(arg, kinds.KEYWORD_ONLY, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    made += [(args.kwarg, kinds.VAR_KEYWORD, None)] if args.kwarg else []
    return inspect.Signature([kinds(arg.arg, kind, default=default or kinds.empty) for arg, kind, default in made])


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

    Args:
        shown: the option and its value, such as "--custom-rm-path my.f"; what is an HpcrlError already passes.
    """
    try:
        yield
    except (HpcrlError, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # whatever the user's code does, SystemExit included
        print(trace_of(error), file=sys.stderr, flush=True)
        hints = ["its traceback is in the log", *lacking(error)]
        kind = CodeError if is_mistake(error) else HpcrlError
        raise kind(f"{shown} raised {said_of(error)}", "; ".join(hints)) from error


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
        if not any(part in f.filename for part in (_PACKAGE, "/site-packages/", "/lib/python", "<frozen"))
    ]
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name})" if own else ""


def short(value: Any) -> str:
    """A value for an error."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


# ---- module search

#: an environment variable: the directories of the run's copies of the user's modules, where there are any
SNAPSHOT = "HPCRL_CODE"
SHOWN = 10  #: names that a hint lists at most


def missing(
    path: str, first: Sequence[str] = (), parameters: Sequence[str] = (), keywords: Sequence[str] = ()
) -> tuple[str, str]:
    """Why there can be nothing at the dotted path `module.name`, or nothing that can be called so, and what to do; two
    empty texts where files do not tell.

    Args:
        first: the directories of --code-path.
        parameters, keywords: as of `load_function`.
    """
    module, _, name = path.rpartition(".")
    if not module or module.partition(".")[0] in sys.stdlib_module_names:
        return "", ""
    parts = module.split(".")
    where = search_path(first)
    spec = None
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        spec = find_module(full, where, top=depth == 1)
        if spec is None:
            return f"there is no module {full}", _shadowed(parts[0], first) if depth > 1 else searched(first)
        if spec.submodule_search_locations is None and depth < len(parts):
            return f"{full} is not a package", f"its file is {spec.origin}"
        where = list(spec.submodule_search_locations or ())
    if spec is None or not (spec.origin or "").endswith(".py"):
        return "", ""
    file = Path(str(spec.origin))
    there = names_in(file)
    if name not in there and "*" not in there:
        return f"{module} has no {name}", f"{file} defines {_listed(file)}"
    signature = written_signature(file, name) if name in there and parameters else None
    return unfit(signature, name, parameters, keywords) if signature is not None else ("", "")


def searched(first: Sequence[str] = ()) -> str:
    """Where modules are looked for, as a hint."""
    before = [*filter(None, os.environ.get(SNAPSHOT, "").split(os.pathsep)), *first]
    places = "".join(f"{folder}, " for folder in before)
    return f"modules are looked for in {places}{os.getcwd()}, where the run is started, and in PYTHONPATH"


def _shadowed(top: str, first: Sequence[str]) -> str:
    """The hint for a module that is missing in the package `top`: another package of that name may hide the user's
    directory."""
    spec = find_module(top, search_path(first), top=True)
    own = Path.cwd() / top
    if spec is not None and spec.origin and own.is_dir() and Path(spec.origin).parent != own:
        return f"{top} is the package in {Path(spec.origin).parent}, which hides {own}: put an __init__.py there"
    return searched(first)


def names_in(file: Path) -> set[str]:
    """Names that a module's source binds anywhere; "*" if it may bind others, or cannot be read."""
    try:
        tree = ast.parse(read_given_bytes(file))
    except (OSError, SyntaxError, ValueError):
        return {"*"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif node.id in ("globals", "setattr"):
                found.add("*")
    return found | ({"*"} if "__getattr__" in found else set())


def _listed(file: Path) -> str:
    """The functions and classes that a module defines at its top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return listed(node.name for node in ast.parse(read_given_bytes(file)).body if isinstance(node, kinds))


def listed(names: Iterable[str]) -> str:
    """The first SHOWN of these names, for a hint."""
    return ", ".join(list(names)[:SHOWN]) or "no functions"
