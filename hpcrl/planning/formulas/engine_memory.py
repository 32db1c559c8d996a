"""Bytes that a GPU of an engine takes, and how many tokens its KV cache holds: a pure function of config.json and the
options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hpcrl.config.options import Options
from hpcrl.config.passthrough import settings
from hpcrl.config.rules.sampling import OWN_LAYERS, layers_behind
from hpcrl.models.family import Config, Family, layer_kinds
from hpcrl.planning.formulas.activations import longest_sample
from hpcrl.planning.formulas.nccl_memory import gpu_transfer
from hpcrl.planning.formulas.parameters import largest_module, whole_model
from hpcrl.planning.formulas.training_memory import GIB

#: what vLLM's forward passes need in addition to weights and cache: not computed, an allowance
WORKING = 3 * GIB
UTILIZATION = 0.9  #: vLLM's share of a GPU where it is not installed here to ask
BATCHED = 8192  #: tokens of one pass, of vLLM's server on a GPU of 70 to 160 GB
LEAST_BATCHED = 512
LOW_LATENCY = {"deepep_low_latency": 256, "nixl_ep": 256}  #: all-to-all -> vLLM's own tokens of one pass of a part
_ITEMS = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class EngineTerms:
    """What a GPU of an engine holds.

    Attributes:
        gpu: bytes by what takes them.
        cached_tokens: of all requests together.
        at_once: samples of full length among them.
    """

    gpu: Mapping[str, float]
    cached_tokens: int
    at_once: int

    @property
    def total(self) -> float:
        return sum(self.gpu.values())


def engine_terms(options: Options, family: Family, config: Config, gpu_bytes: float) -> EngineTerms:
    """One GPU of an engine that may take its share of `gpu_bytes`; a negative KV cache says that the weights do not
    fit."""
    weights = gpu_weights(options, family, config) + absorbed_bytes(options, family, config)
    rows = max(workspace_bytes(options, family, config).values(), default=0.0)
    cache = gpu_bytes * share(options, family, config, gpu_bytes) - weights - WORKING - rows
    token, state = token_bytes(options, family, config), sequence_bytes(options, family, config)
    longest = longest_sample(options)
    at_once = max(0, int(cache // (longest * token + state)))
    tokens = max(0, int((cache - max(1, at_once) * state) // token))
    parts = options.engine_data_parallel_size  # each has its own requests
    terms = {"weights": weights, "KV cache": cache, "working memory": float(WORKING), "experts' workspace": rows}
    terms["weight update"] = update_bytes(options, family, config)
    return EngineTerms(terms, parts * tokens, parts * at_once)


def batched_tokens(options: Options) -> int:
    """Tokens of one pass of a data-parallel part of an engine on GPUs.

    Experts that are spread over parts get the rows of all of them, so each then takes its share of vLLM's own number.
    """
    given = options.vllm.get("max_num_batched_tokens")
    parts = options.engine_data_parallel_size
    if given or parts == 1 or not options.vllm.get("enable_expert_parallel"):
        return int(given or BATCHED)
    sequences = int(options.vllm.get("max_num_seqs") or 0)  # vLLM wants a token for each
    least = LOW_LATENCY.get(str(options.vllm.get("all2all_backend")), max(LEAST_BATCHED, BATCHED // parts))
    return max(least, sequences)


def workspace_bytes(options: Options, family: Family, config: Config) -> dict[str, float]:
    """What the experts of one layer need on a GPU where data-parallel parts have them in common, by kernel: none
    otherwise, where it's a part of `WORKING`.

    Every kernel has room for all experts of every row, wherever these are (docs/sizing.md): its input in the order of
    experts, the gate's and the activation's results, and its output, next to the rows that were gathered.
    """
    fields = family.transformer(config)
    if options.engine_data_parallel_size == 1 or not fields.get("num_moe_experts"):
        return {}
    gpus = 1 if options.vllm.get("enable_expert_parallel") else options.rollout_num_gpus_per_engine
    hidden, inner = fields["hidden_size"], fields["moe_ffn_hidden_size"] / gpus
    wide, gate = max(hidden, inner), max(hidden, 2 * inner)
    top = fields["moe_router_topk"]
    rows = batched_tokens(options) * options.engine_data_parallel_size
    if not config.get("quantization_config"):
        return {"Triton": rows * (top * 2 * (wide + gate) + 4 * hidden)}
    return {
        "FlashInfer": rows * (top * (2 * wide + 4 * inner + wide) + 6 * hidden),
        "DeepGEMM": rows * (top * (wide + 2 * gate) + 5 * hidden),
    }


def update_bytes(options: Options, family: Family, config: Config) -> float:
    """What a weight update takes of an engine's GPU outside its share: rounds, and what vLLM keeps of a layer until it
    is complete.

    In pieces one bucket (two rounds of half of it) and this GPU's part of the largest layer; of whole tensors all of
    that layer, be the engine as large as it may, and two messages of vllm's. Over CUDA IPC the bucket is the trainer
    rank's, which keeps it.
    """
    layer = largest_module(family, config) * item_bytes(options, config)
    if options.weight_transfer == "disk":
        return layer
    if gpu_transfer(options) == "vllm":
        return 2 * options.update_weight_buffer_size + layer
    return options.update_weight_buffer_size + layer / options.rollout_num_gpus_per_engine


def share(options: Options, family: Family, config: Config, gpu_bytes: float) -> float:
    """The share of a GPU of `gpu_bytes` that an engine is started with for weights, cache and working memory.

    What the user gives; else vLLM's own, or, in hundredths, what a weight update leaves of the GPU if that is less. An
    engine that takes turns with the trainer has put its cache away while weights are updated, and of one that holds no
    update's bytes at all vLLM's own says it.
    """
    own = utilization(options)
    rest = gpu_bytes - update_bytes(options, family, config)
    mine = options.vllm.keys() & {
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
    }  # with the second vLLM looks at no share
    if mine or options.takes_turns or options.debug_rollout_only or rest < gpu_bytes / 100:
        return own
    return min(own, math.floor(100 * rest / gpu_bytes) / 100)


def utilization(options: Options) -> float:
    """What the user gives as that share, or vLLM's own."""
    given = options.vllm.get("gpu_memory_utilization")
    if given is not None:
        return float(given)
    found = (settings("vllm") or {}).get("gpu_memory_utilization")
    try:
        return float(found.default) if found else UTILIZATION
    except ValueError:
        return UTILIZATION


def gpu_weights(options: Options, family: Family, config: Config) -> float:
    """Bytes of the weights on one GPU: experts divided over all of the engine's, the rest over those of a data-parallel
    part."""
    config = served(options, config)
    whole = model_bytes(options, family, config)
    experts = whole_model(family, config).expert * item_bytes(options, config)
    return experts / options.rollout_num_gpus_per_engine + (whole - experts) / options.engine_tensor_parallel_size


def absorbed_bytes(options: Options, family: Family, config: Config) -> float:
    """Bytes, on one GPU, of what vLLM makes of the matrix of keys and values of multi-head latent attention, in the
    dtype of activations, and keeps next to it (W_UK_T and W_UV of its MLAAttention)."""
    fields = family.transformer(served(options, config))
    if not fields.get("multi_latent_attention"):
        return 0.0
    rows = fields["num_attention_heads"] * (fields["qk_head_dim"] + fields["v_head_dim"])
    item = 2 if options.bf16 else 4
    return 1.0 * fields["num_layers"] * rows * fields["kv_lora_rank"] * item / options.engine_tensor_parallel_size


def served(options: Options, config: Config) -> Config:
    """config.json of what an engine holds: where it drafts with the layers behind the last one, those too."""
    setting = options.vllm.get("speculative_config") or {}
    if setting.get("method") != OWN_LAYERS:
        return config
    more = layers_behind(config)
    longer = {**config, "num_hidden_layers": config["num_hidden_layers"] + more}
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if kinds := config.get(name):
            longer[name] = [*kinds, *[kind] * more]
    return longer


def model_bytes(options: Options, family: Family, config: Config) -> float:
    """Bytes of the weights that an engine serves: with a quantization_config the embeddings are bf16."""
    more = 2.0 * config["vocab_size"] * config["hidden_size"] if config.get("quantization_config") else 0.0
    return whole_model(family, config).all * item_bytes(options, config) + more


def item_bytes(options: Options, config: Config) -> float:
    """Bytes of a number of a weight matrix in an engine."""
    return 1.0 if config.get("quantization_config") else 2.0 if options.bf16 else 4.0


def token_bytes(options: Options, family: Family, config: Config) -> float:
    """Bytes of one token in the KV cache of one GPU: keys and values of every layer; with fewer heads than GPUs each
    holds one.  Of multi-head latent attention each holds the one vector that they come from, and the rotated key."""
    fields = family.transformer(served(options, config))
    heads = max(1.0, fields["num_query_groups"] / options.engine_tensor_parallel_size)
    item = _ITEMS.get(str(options.vllm.get("kv_cache_dtype")), 2 if options.bf16 else 4)
    if fields.get("multi_latent_attention"):
        return 1.0 * fields["num_layers"] * (fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"]) * item
    layers = sum(not kind.linear for kind in layer_kinds(fields))  # the state of the others does not grow
    return 2.0 * layers * heads * fields["kv_channels"] * item


def sequence_bytes(options: Options, family: Family, config: Config) -> float:
    """Bytes of one sequence in the cache of one GPU whatever its length: state and last rows of the convolution of
    every gated delta net, without what vLLM rounds a block of its cache up by.

    The state is in the dtype that config.json or vLLM's settings say, else in the convolution's.
    """
    fields = family.transformer(served(options, config))
    layers = sum(kind.linear for kind in layer_kinds(fields))
    if not layers:
        return 0.0
    keys = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    values = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
    plain = "bfloat16" if options.bf16 else "float32"
    cached = _dtype_setting(options, "mamba_cache_dtype") or plain
    state = _dtype_setting(options, "mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype") or cached
    rows = (fields["linear_conv_kernel_dim"] - 1) * (2 * keys + values) * _width(cached)
    whole = rows + values * fields["linear_key_head_dim"] * _width(str(state))
    return layers * whole / options.engine_tensor_parallel_size


def _dtype_setting(options: Options, name: str) -> str | None:
    """A dtype among vLLM's settings; None for its "auto"."""
    given = options.vllm.get(name)
    return None if given in (None, "auto") else str(given)


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2
