"""A taskset of the `verifiers` package, version 0.4, as a source of prompts and a maker of responses.

    python -m hpcrl.rollout.samplers.verifiers_tasks TASKSET --out DIR [--eval N] [--args JSON] [--shell] [--image DIR]
        writes the prompt files
    --custom-generate-function-path hpcrl.rollout.samplers.verifiers_tasks.generate
        makes the responses

The agent of a task works in a sandbox, with a shell or without any tool (`verifiers_box.py`), and the task grades
what it has done there.  hpcrl does not install the package; environments of 0.1 are `verifiers_env.py`'s.

Invariant: nothing of the package is imported before one of the two is used; what it cannot do here is said.  A lost
sandbox is raised as that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError, HpcrlError, UsageError
from hpcrl.rollout.samplers.verifiers_env import numbers, written
from hpcrl.sample import Sample
from hpcrl.sandbox import BoxLimits, sandbox
from hpcrl.sandbox.harbor.task import usual_workdir

#: of a prompt's metadata: {"taskset": its id, "args": of its config, "shell", "image", "data": of the task}
KEY = "verifiers_task"
INSTALL = "pip install --no-deps 'verifiers>=0.4,<0.5', and what it needs, in the environment that runs hpcrl"
LIMITS = BoxLimits()
SECONDS = 600.0  #: that a command of a task may take, such as its tests


_loaded: dict[str, Any] = {}  #: tasksets of this process, by their id and arguments


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> None:
    """Have an agent of the package's work at the task, at the endpoint; its reward and metrics are the sample's."""
    asked = sample.metadata.get(KEY)
    if not isinstance(asked, dict) or "taskset" not in asked:
        raise DataError(f"the prompt's metadata has no {KEY!r}", "write the prompt file with this module")
    name = json.dumps([asked["taskset"], asked["args"]], sort_keys=True)
    if name not in _loaded:
        _loaded[name] = load(asked["taskset"], asked["args"])
    trace = await _worked(_loaded[name], asked, args, sampling_params)
    if not trace.ok:
        said = "; ".join(f"{error.type}: {error.message}" for error in trace.errors)
        raise HpcrlError(f"the task of {asked['taskset']} failed: {said or trace.stop_condition}")
    sample.reward = float(trace.reward)
    sample.rewards = numbers(trace.metrics)


async def _worked(taskset: Any, asked: dict[str, Any], args: Any, sampling_params: dict[str, Any]) -> Any:
    """The trace of one agent at one task.

    Raises:
        SandboxLost: if its sandbox was, whatever verifiers has made of that.
    """
    vf = package()
    from hpcrl.rollout.samplers.verifiers_box import BoxHarness, BoxRuntime

    kind = type(taskset).task_type()
    task = kind(kind.data_type().model_validate(asked["data"]), taskset.config.task)
    key = f"HPCRL_POLICY_{secrets.token_hex(8)}"  # the package takes keys by a variable's name alone
    os.environ[key] = args.api_key
    params = {"max_tokens": sampling_params["max_new_tokens"], "stop": sampling_params["stop"] or None}
    config = vf.AgentConfig(
        model="policy",
        client=vf.EvalClientConfig(base_url=args.base_url, api_key_var=key),
        sampling=vf.SamplingConfig(**{name: value for name, value in params.items() if value}),
        runtime=vf.SubprocessConfig(),  # never started: the sandbox is lent
        harness={"id": "null"},
    )
    try:
        async with sandbox(asked["image"], LIMITS) as box:
            runtime = BoxRuntime(box, usual_workdir(asked["image"]), SECONDS)
            agent = vf.make_agent(config)
            agent.harness = BoxHarness(agent.harness.config, asked["shell"])
            trace = await agent.run(task, runtime=runtime)
            if runtime.lost:
                raise runtime.lost
            return trace
    finally:
        del os.environ[key]


def package() -> Any:
    """The package's `verifiers.v1`.

    Raises:
        UsageError: if it cannot be imported, or has another interface.
    """
    try:
        import verifiers.v1 as found
    except ImportError as error:
        raise UsageError(f"the Python package verifiers 0.4 cannot be imported: {error}", INSTALL) from error
    missing = [name for name in ("load_taskset", "make_agent", "AgentConfig", "Task") if not hasattr(found, name)]
    if missing:
        raise UsageError(f"the installed verifiers has another interface: no {', '.join(missing)}", INSTALL)
    return found


def load(taskset: str, args: dict[str, Any]) -> Any:
    """A taskset by its id.

    Raises:
        UsageError: with what the package says if it cannot be loaded, or if it brings an environment of several agents.
    """
    vf = package()
    try:
        if vf.environment_class(taskset, "") is not vf.SingleAgentEnv:
            raise UsageError(f"the taskset {taskset} has an environment of its own", "tasks of one agent are run here")
        return vf.load_taskset(vf.taskset_config_type(taskset)(id=taskset, **args))
    except UsageError:
        raise
    except Exception as error:  # a taskset is a program of its authors
        raise UsageError(f"the taskset {taskset} cannot be loaded: {type(error).__name__}: {error}", INSTALL) from error


# ---- the prompt files


def rows(asked: dict[str, Any], tasks: Iterable[Any]) -> Iterable[dict[str, Any]]:
    """A line of a prompt file for every task.

    Raises:
        DataError: for one without a prompt, or of an image that is not given.
    """
    from verifiers.v1.dialects.chat import message_to_wire

    for number, task in enumerate(tasks):
        data = task.data
        if data.prompt is None:
            raise DataError(f"task {number} of {asked['taskset']} has no prompt", "tasks that a user opens are not run")
        if data.image and asked["image"] == "system":
            raise DataError(
                f"task {number} of {asked['taskset']} wants the image {data.image}",
                "unpack it (docker export) and give --image DIR",
            )
        text = isinstance(data.prompt, str)
        prompt = [{"role": "user", "content": data.prompt}] if text else [message_to_wire(m) for m in data.prompt]
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        yield {"prompt": [*system, *prompt], "metadata": {KEY: asked | {"data": data.model_dump(mode="json")}}}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcrl.rollout.samplers.verifiers_tasks", description="Write train.jsonl and heldout.jsonl."
    )
    parser.add_argument("taskset", help="id of the taskset, as verifiers 0.4 loads it")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--eval", type=int, default=64, help="lines of heldout.jsonl, the taskset's first tasks")
    parser.add_argument("--most", type=int, default=100_000, help="tasks that are read")
    parser.add_argument("--args", type=json.loads, default={}, help="JSON object of the taskset's config")
    parser.add_argument("--shell", action="store_true", help="the agent has a shell in its sandbox")
    parser.add_argument("--image", default="system", help="of its sandbox: an unpacked root file system")
    given = parser.parse_args()
    asked = {"taskset": given.taskset, "args": given.args, "shell": given.shell, "image": given.image}

    def lines() -> tuple[Iterable[dict[str, Any]], Iterable[dict[str, Any]]]:
        tasks = iter(itertools.islice(load(given.taskset, given.args), given.most))
        return rows(asked, tasks), rows(asked, itertools.islice(tasks, given.eval))

    return written(given.out, lines)


if __name__ == "__main__":
    sys.exit(main())
