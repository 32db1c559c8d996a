"""A process that hands an engine's settings to vLLM's own config classes: `python -m
hpcrl.planning.rehearsal.engine_process DIRECTORY`, with the options in DIRECTORY/options.json; what vLLM says is in
DIRECTORY/engine.json.

Invariant: no server, worker or GPU is asked; what only they could judge is left out, and named.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.options import Options
from hpcrl.engine.multi_node import MEETING
from hpcrl.errors import HpcrlError
from hpcrl.planning.rehearsal.library_errors import LONGEST, explained, flags_of
from hpcrl.planning.rehearsal.reports import EngineReport
from hpcrl.utils.untrusted_files import read_regular

#: fields that name machines, or what is loaded into a worker
OF_MACHINE = {
    "data_parallel_address",
    "data_parallel_rpc_port",
    "worker_extension_cls",
    "weight_transfer_config",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "distributed_executor_backend",
}
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
#: what vLLM says of a model whose module cannot be imported without a GPU's packages
UNREAD = "failed to be inspected"
#: of the errors of pydantic, what vLLM itself has said
SAID = re.compile(r"Value error, (.*?)(?: \[type=| For further|$)")


def main(argv: list[str]) -> int:
    """Write what vLLM says of the engine of the options."""
    directory = Path(argv[0])
    options = Options.model_validate_json(read_regular(directory / "options.json"))
    try:
        os.environ.update(environment(options) | ENVIRONMENT | {MEETING: "1,2"})
        report = judged(options)
    except HpcrlError as error:
        report = EngineReport(error=error.what, hint=error.hint or "")
    except ImportError as error:
        report = EngineReport(absent=str(error))
    except Exception as error:  # noqa: BLE001  (told to the user)
        what, hint = explain_error(error, options)
        report = EngineReport(error=what, hint=hint)
        if UNREAD in what:
            report = EngineReport(absent="it cannot import the model's class")
    (directory / "engine.json").write_bytes(msgspec.json.encode(report))
    return 0


def judged(options: Options) -> EngineReport:
    """What vLLM makes of the settings, and what it chooses; raises what it refuses them with."""
    from hpcrl.planning.rehearsal import h100

    h100.install(max(h100.NODE, options.rollout_num_gpus_per_engine))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from hpcrl.engine.server_settings import EMPTY
    from hpcrl.planning.rehearsal.engine_choices import choices

    given = settings(options, {field.name for field in fields(AsyncEngineArgs)})
    kept = {name: value for name, value in given.items() if name not in OF_MACHINE}
    arguments = AsyncEngineArgs(**({"skip_tokenizer_init": True} | kept))
    config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    parallel = config.parallel_config
    report = EngineReport(
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        data=parallel.data_parallel_size,
        longest=config.model_config.max_model_len,
        quantization=str(config.model_config.quantization or ""),
    )
    try:
        report.choices = choices(config, given.get("load_format") == EMPTY)
    except (ValueError, NotImplementedError):  # vLLM's own words
        raise
    except Exception as error:  # noqa: BLE001  (what asks for the GPU itself)
        report.unshown = f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"
    return report


def environment(options: Options) -> dict[str, str]:
    """The environment of the first engine on a GPU's machine that finds what this one finds."""
    from hpcrl.engine.server_settings import server_environment
    from hpcrl.errors import UsageError
    from hpcrl.run.gpu_environment import build_tools

    plan, build = placed(options)
    try:
        return server_environment(options, plan, 0, os.environ, build)
    except UsageError:  # no nvcc: `look_for_tools` says so
        return {**os.environ, **build_tools(os.environ)}


def placed(options: Options) -> tuple[Any, Any]:
    """(the plan of a run on this machine, vLLM's build here taken for one for GPUs)"""
    from hpcrl.engine.server_settings import Build, build
    from hpcrl.plan import local_hosts, make_plan

    return make_plan(options, local_hosts(options), "rehearsal"), Build(build().version, False)


def settings(options: Options, known: set[str]) -> dict[str, Any]:
    """The fields of vLLM's that the first engine is started with on a GPU."""
    from hpcrl.engine.server_settings import flags

    plan, build = placed(options)
    found = flags(options, plan, 0, 0, build)
    return {name: value for name, value in found.items() if name in known}


def explain_error(error: Exception, options: Options) -> tuple[str, str]:
    """(what vLLM says without pydantic's words around it, the flags that it is about)"""
    text = " ".join(str(error).split())
    own = SAID.search(text)
    if own is None:
        return explained(error, options)
    flags = flags_of(own[1].replace(" ", "_") + " " + own[1], options)
    return f"vLLM refuses it: {own[1]}", f"it is about {', '.join(flags)}" if flags else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
