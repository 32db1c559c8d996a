"""Settings that use less memory, for the attempt after an out-of-memory error.

Invariant: nothing here changes the loss, which depends on the batch alone.  A trainer computes the same in smaller
parts, an engine answers fewer requests at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hpcrl.config.options import Options
from hpcrl.errors import PeerError
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.planning.formulas.activations import RECOMPUTE, longest_sample, tokens_per_gpu
from hpcrl.planning.formulas.engine_memory import share, utilization
from hpcrl.run.exit_status import out_of_memory
from hpcrl.run.rundir import AttemptFailure

ROWS = 1024  #: rows with logits at a time, at least: half of them would save little
SHARE = 0.05  #: of a GPU's memory: how much less an engine uses at each step
REQUESTS = 256  #: vLLM's smallest default of max_num_seqs for a server (vllm/engine/arg_utils.py)


class Smaller(NamedTuple):
    """A setting that takes less memory.

    Attributes:
        setting: its name.
        update: of the options.
        text: its flag, with the value that it had.
        engines: whether engines have to be restarted for it.
    """

    setting: str
    update: dict[str, Any]
    text: str
    engines: bool = False


def next_smaller(options: Options, failure: AttemptFailure | None, done: Sequence[str]) -> Smaller | None:
    """The setting that was lowered least often, the first of several; None after another error, after --oom-retries,
    with --attempts 1, and where nothing is left to lower.

    Args:
        done: the settings that were lowered before.
    """
    said = out_of_memory(failure.message) if failure else ""
    if failure is None or not said or options.attempts == 1 or len(done) >= options.oom_retries:
        return None
    if failure.role.startswith("engine") or failure.kind == PeerError.__name__:  # as an engine has told a rank
        steps = _of_engine(options, said)
    else:
        steps = _of_trainer(options) if failure.role == "trainer" else iter(())
    return min(steps, key=lambda step: done.count(step.setting), default=None)


def _of_trainer(options: Options) -> Iterator[Smaller]:
    chunk, tokens = options.log_probs_chunk_size, tokens_per_gpu(options)
    if (rows := min(chunk, tokens) if chunk > 0 else tokens) > ROWS:
        yield _smaller("log_probs_chunk_size", max(ROWS, rows // 2), "" if chunk < 0 else chunk)
    alone = 1 if options.learns_labels else -(-longest_sample(options) // options.context_parallel_size)
    if options.use_dynamic_batch_size:
        most = options.max_tokens_per_gpu or 0
        if most > alone:
            yield _smaller("max_tokens_per_gpu", max(alone, most // 2), most)
    elif (size := options.micro_batch_size) > 1:
        yield _smaller("micro_batch_size", size // 2, size)
    if options.megatron.get("recompute_granularity") != "full":
        kept = {name: value for name, value in options.megatron.items() if name != "recompute_modules"}
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in RECOMPUTE.items())
        yield Smaller("recompute_granularity", {"megatron": kept | RECOMPUTE}, flags)


def _of_engine(options: Options, said: str) -> Iterator[Smaller]:
    """An engine without cache blocks keeps its share: a smaller one would leave even less for the cache."""
    used = _share_in_use(options, said)
    if "cache blocks" not in said and "kv_cache_memory_bytes" not in options.vllm and used > 2 * SHARE:
        yield _of_vllm(options, "gpu_memory_utilization", round(used - SHARE, 3), used)
    most = int(options.vllm.get("max_num_seqs") or min(options.rollout_server_concurrency, REQUESTS))
    if most > 1:
        yield _of_vllm(options, "max_num_seqs", most // 2, options.vllm.get("max_num_seqs", ""))


def _share_in_use(options: Options, said: str) -> float:
    """The share of a GPU's memory that the engine had, from the error, or from the GPU's size in the error: less than
    vLLM's default where a weight update needs room."""
    if told := re.search(r"utilization \((0?\.\d+)", said):
        return float(told[1])
    if not (size := re.search(r"total capacity of ([\d.]+) GiB", said)):
        return utilization(options)
    config = read_config(options.hf_checkpoint)
    return share(options, find_family(config, options.hf_checkpoint), config, float(size[1]) * 2**30)


def _smaller(name: str, value: float, old: Any) -> Smaller:
    was = "" if old == "" else f" instead of {old}"
    return Smaller(name, {name: value}, f"--{name.replace('_', '-')} {value}{was}")


def _of_vllm(options: Options, name: str, value: float, old: Any) -> Smaller:
    text = _smaller(f"vllm_{name}", value, old).text
    return Smaller(name, {"vllm": {**options.vllm, name: value}}, text, engines=True)
