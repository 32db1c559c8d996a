"""One vLLM server, as the supervisor starts it: vLLM's own API server on a socket that is already bound.

    HPCRL_LISTEN_FD=N python -m hpcrl.engine.server RUN --attempt N --index I

Invariants: what is served is vLLM's own application, behind our guard; an argument that vLLM does not know is an error
that names the nearest; the processes that vLLM spawns begin with this file too, before any code of theirs.
"""

from __future__ import annotations

import difflib
import json
import os
import socket
import sys
from argparse import Namespace, _AppendAction
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from hpcrl.engine.multi_node import node_of
from hpcrl.engine.server_settings import LISTEN_FD, Build, build, flags, share_flags
from hpcrl.engine.vllm_pickles import SPAWNED, read_by_list
from hpcrl.errors import HpcrlError, UsageError, failure_kind
from hpcrl.run.process import die_with_parent
from hpcrl.run.role import RoleContext, open_role, say
from hpcrl.utils.imports import without_collection

if TYPE_CHECKING:
    from argparse import Action, ArgumentParser


def command_line(parser: ArgumentParser, values: Mapping[str, Any]) -> list[str]:
    """Fields and values as the flags of vLLM's own parser.

    Raises:
        UsageError: for a field that it does not have.
    """
    known = {action.dest: action for action in parser._actions if action.option_strings}
    line: list[str] = []
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean --vllm-{near[0].replace('_', '-')}?" if near else ""
            raise UsageError(f"--vllm-{name.replace('_', '-')}: the installed vLLM has no such argument", hint)
        line += _spell(known[name], value)
    return line


def _spell(action: Action, value: Any) -> list[str]:
    flag = action.option_strings[0]
    if action.nargs == 0:  # a switch
        wanted = value if isinstance(value, bool) else str(value).lower() in ("1", "true", "yes", "")
        off = [o for o in action.option_strings if o.startswith("--no-")]
        return [flag] if wanted else off[:1]
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [flag, *map(str, value)]
    if isinstance(value, list) and isinstance(action, _AppendAction):
        return [word for one in value for word in (flag, str(one))]
    if isinstance(value, list | dict):
        return [flag, json.dumps(value)]
    return [flag, str(value)]


def parse(values: Mapping[str, Any]) -> Namespace:
    """vLLM's arguments from our fields, checked by its own parser."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from hpcrl.engine.loading.model_types import register_model_types

    register_model_types()

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"vLLM refuses its arguments: {message}", "see the --vllm-... options")

    parser = make_arg_parser(Parser())
    args = parser.parse_args(command_line(parser, values))
    validate_parsed_serve_args(args)
    return args


async def serve(sock: socket.socket, args: Namespace, fork: bool, http: type[Any]) -> None:
    """Run vLLM's API server on a bound socket until a signal ends it.

    Args:
        http: uvicorn's protocol for it.
    """
    from vllm.entrypoints.launchers.api_server import entry

    address = "http://{}:{}".format(*sock.getsockname()[:2])
    if not fork:
        await entry.run_server_worker(address, sock, args, http=http)
        return
    async with entry.build_async_engine_client_from_engine_args(forking_arguments(args)) as client:
        ended = await entry.build_and_serve(client, address, sock, args, http=http)
    try:
        await ended
    finally:
        sock.close()


def follow(args: Namespace) -> None:
    """vLLM's own headless start: the workers of this host, until the first part ends or a signal ends this process."""
    from vllm.entrypoints.cli.serve import run_headless

    args.api_server_count = 0
    run_headless(args)


def forking_arguments(args: Namespace) -> Any:
    """Engine arguments whose engine core is forked from this process instead of started afresh.

    That saves importing torch and vLLM a second time, some five seconds.  vLLM's CPU platform asks for `spawn` while
    the configuration is made; we ask for `fork` once it is, which is safe here: no accelerator is in use, and this
    process has not computed anything yet.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    class ForkingArgs(AsyncEngineArgs):
        def create_engine_config(self, *given: Any, **named: Any) -> Any:
            config = super().create_engine_config(*given, **named)
            import vllm.v1.engine.core
            import vllm.v1.worker.cpu_worker  # noqa: F401

            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            return config

    return ForkingArgs.from_cli_args(args)


def inspect_models_here() -> None:
    """Have vLLM look at the class of the model in this process, which imports it anyway.

    Where it has not kept what it saw there, vLLM asks a process that imports all of vLLM first, since importing a model
    may begin to use a GPU: on CPUs that is twice the time of an engine's start for nothing.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def settings(context: RoleContext, port: int, found: Build) -> dict[str, Any]:
    """vLLM's arguments on this host, where the GPU can be looked at."""
    values = flags(context.options, context.plan, context.index, port, found)
    if found.cpu or context.options.debug_rollout_only:
        return values
    from vllm.platforms import current_platform

    mine = share_flags(context.options, current_platform.get_device_total_memory())
    for name, value in mine.items():
        say(f"{name} is {value:.2f}, so that a weight update also fits")
    return values | mine


def run(context: RoleContext) -> None:
    """Parse the arguments and serve, or be a part of an engine whose server is on another host."""
    with without_collection():
        found = build()
        read_by_list()
        if not node_of():
            from vllm.entrypoints.launchers.api_server import entry  # noqa: F401  (most of what `serve` needs)
    if node_of():
        follow(parse(settings(context, 1, found)))
        return
    if found.cpu:
        inspect_models_here()
    sock = socket.socket(fileno=int(os.environ.pop(LISTEN_FD)))
    sock.set_inheritable(False)
    values = settings(context, sock.getsockname()[1], found)
    import uvloop

    args = parse(values)
    fork = found.cpu and args.distributed_executor_backend == "uni"
    if fork:
        os.register_at_fork(after_in_child=sock.close)  # only the server itself answers
        os.register_at_fork(after_in_child=die_with_parent)
    uvloop.run(serve(sock, args, fork, bounded_http()))


def main() -> int:
    die_with_parent()
    context = open_role()
    try:
        run(context)
    except HpcrlError as error:
        place = context.plan.engine_nodes(context.index)[node_of()].host
        say(f"error: {error}")
        if not context.incarnation:  # a later incarnation is its supervisor's to explain
            context.rundir.fail("engine", context.index, f"on {place}: {error}", failure_kind(error))
        return error.exit_code
    return 0


# ---- HTTP with a limit
#
# uvicorn's HTTP with a limit for what comes before a request's body, for its option `http`.
#
# With httptools, uvicorn itself keeps a request line and headers without end, before the guard of the engine's key
# sees the request. No body is read of a request that the guard refuses.

HEAD = 2**16  #: bytes of a request before its body


def bounded_http() -> type[Any]:
    """uvicorn's protocol that ends a connection over which more than HEAD bytes have come and no request."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class BoundedHttp(AutoHTTPProtocol):
        came = 0  #: bytes since the last request

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            waiting = self.cycle is before and (before is None or before.response_complete)
            self.came = self.came + len(data) if waiting else 0
            if self.came > HEAD:
                self.transport.abort()

    return BoundedHttp


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == SPAWNED:
    read_by_list()
