"""What vLLM chooses for an engine's GPUs: its own config, groups and model, whose tensors are memory that nothing
writes, on the machine of h100.py.

Invariant: all of it is asked of vLLM's objects, except one number: the experts that an empty start's tokens go to are
torch's top-k over the router's weights, since vLLM's is a kernel. What FlashInfer's kernels take inside is not in vLLM.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from typing import Any

import torch
from torch import nn

from hpcrl.planning.rehearsal.h100 import join_groups
from hpcrl.planning.rehearsal.reports import EngineChoices
from hpcrl.run.gpu_environment import NVCC

TOKENS = 4096  #: that an empty start's routers are asked about


def choices(config: Any, starts_empty: bool) -> EngineChoices:
    """Those for vLLM's `config` of an engine."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    found = EngineChoices(
        batched=config.scheduler_config.max_num_batched_tokens,
        sequences=config.scheduler_config.max_num_seqs,
    )
    with set_current_vllm_config(config), torch.device("cpu"), set_default_torch_dtype(config.model_config.dtype):
        join_groups(config.parallel_config)
        model = initialize_model(vllm_config=config)
        _attention(config, found)
        _experts(config, model, found)
        if found.all_experts and starts_empty:
            found.reached = routed(model, found.all_experts, config.model_config.get_hidden_size())
        look_for_tools(model, found)
    found.weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return found


def _attention(config: Any, found: EngineChoices) -> None:
    """Backends of the layers with a cache, its bytes, and the CUDA graphs that the least able of them allows."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.kv_cache_interface import AttentionSpec

    compilation = config.compilation_config
    names, least, who = [], AttentionCGSupport.ALWAYS, None
    for layer in compilation.static_forward_context.values():
        spec = layer.get_kv_cache_spec(config) if hasattr(layer, "get_kv_cache_spec") else None
        if spec is None:
            continue
        backend = layer.get_attn_backend()
        names.append(backend.get_name())
        if isinstance(spec, AttentionSpec):  # the state of others is a request's, not a token's
            found.token_bytes += spec.page_size_bytes / spec.block_size
        support = backend.get_builder_cls().get_cudagraph_support(config, spec)
        if support.value < least.value:
            least, who = support, backend.__name__
    found.attention = ", ".join(dict.fromkeys(names))
    v2 = config.use_v2_model_runner
    mode = compilation.resolve_cudagraph_mode_and_sizes(least, who, use_v2_model_runner=v2)
    found.graphs = mode.name
    found.captured = tuple(compilation.cudagraph_capture_sizes or ()) if found.graphs != "NONE" else ()


def _experts(config: Any, model: nn.Module, found: EngineChoices) -> None:
    """Kernel, exchange and workspace of the experts, by the first layer of them."""
    from vllm.distributed.parallel_state import get_ep_group

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if not hasattr(method, "moe_kernel"):
            continue
        method._init_moe_kernel(layer)  # as after loading, whose conversions are left out
        kernel, moe = method.moe_kernel.fused_experts, method.moe
        chosen = getattr(method, "fp8_backend", None) or method.unquantized_backend
        found.experts, found.all_experts = chosen.value, moe.num_experts
        rows = found.batched * moe.dp_size  # all that data-parallel parts gather
        shapes = kernel.workspace_shapes(
            rows,
            layer.w13_weight.shape[1],
            moe.hidden_dim,
            moe.experts_per_token,
            moe.num_experts,
            moe.num_local_experts,
            None,
            moe.activation,
        )
        first, second, out = map(math.prod, shapes)  # FusedMoEKernelModularImpl._allocate_buffers shares first and out
        found.workspace = (max(first, out) + second) * kernel.workspace_dtype(moe.in_dtype).itemsize
        if moe.moe_parallel_config.dp_size > 1:
            manager = get_ep_group().device_communicator.all2all_manager
            found.exchange = f"{config.parallel_config.all2all_backend} ({type(manager).__name__})"
        return


def routed(model: nn.Module, experts: int, hidden: int) -> int:
    """How many experts random tokens go to in the first layer of experts of an engine that starts empty."""
    from hpcrl.engine.loading.empty_start import empty

    named = dict(model.named_parameters())
    router = next(name for name, part in named.items() if part.shape == (experts, hidden))
    layer = ".".join(router.split(".")[:3])  # model.layers.N
    norm = [name for name, part in named.items() if name.startswith(layer) and part.shape == (hidden,)][-1]
    table = next(name for name in named if name.endswith("embed_tokens.weight"))
    parts = {name: nn.Parameter(named[name].clone()) for name in (norm, router)}
    parts[table] = nn.Parameter(named[table][:TOKENS].clone())
    holder = nn.Module()
    holder.named_parameters = lambda: iter(parts.items())  # type: ignore[assignment]
    empty(holder, 0.0)
    with torch.no_grad():
        rows = nn.functional.rms_norm(parts[table].float(), (hidden,), parts[norm].float())
        top = max(1, getattr(model.config, "num_experts_per_tok", 1))
        return len((rows @ parts[router].float().T).topk(top).indices.unique())


def look_for_tools(model: nn.Module, found: EngineChoices) -> None:
    """What compiles kernels as the engine runs, and is not found by its environment."""
    from vllm.utils.deep_gemm import is_deep_gemm_supported
    from vllm.utils.flashinfer import _flashinfer_nvcc_path, has_flashinfer

    path = _flashinfer_nvcc_path()  # CUDA_HOME, PATH, /usr/local/cuda, as DeepGEMM looks
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout if path else ""
    release = re.search(r"release (\d+)\.(\d+)", said)
    old = release is None or tuple(map(int, release.groups())) < NVCC
    blocks = any("weight_scale_inv" in name for name, _ in model.named_parameters())
    found.no_nvcc = blocks and is_deep_gemm_supported() and old
    if not has_flashinfer():
        found.no_flashinfer = (*([] if path else ["nvcc"]), *([] if shutil.which("ninja") else ["ninja"]))
