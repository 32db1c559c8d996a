"""Megatron-core on CPU tensors and gloo.

Megatron-core (0.16 to 0.19) is written for CUDA: it asks torch.cuda for the current device, allocates with the literal
"cuda", and names tensor types like 'torch.cuda.FloatTensor'.  `install` puts the CPU in the place of CUDA, or in tests
a device that knows shapes alone (hpcrl/planning/rehearsal/device.py).

Invariants: only `hpcrl/trainer/megatron/replaced.py` calls it, where there is no CUDA; every replacement says what
breaks without it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

CPU = "cpu"


def literals(device: str) -> dict[str, str]:
    """String constants in Megatron's functions, and what they are on `device`."""
    prefix = "torch." if device == CPU else f"torch.{device}."
    kinds = ("FloatTensor", "HalfTensor", "BFloat16Tensor")
    return {"cuda": device} | {f"torch.cuda.{kind}": prefix + kind for kind in kinds}


#: the modules that hold such constants on paths we take
RETARGET = (
    "megatron.core.optimizer.optimizer",  # found_inf on "cuda"; the optimizers group parameters by type name
    "megatron.core.optimizer.distrib_optimizer",  # type names
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",  # states of the part on the GPU, as they are loaded
    "megatron.core.optimizer.clip_grads",  # the norm and its coefficient
    "megatron.core.pipeline_parallel.schedules",  # the token counter
    "megatron.core.utils",  # the global memory buffer
    "megatron.core.transformer.moe.moe_utils",  # counters of the router
    "megatron.core.dist_checkpointing.exchange_utils",  # tensors exchanged on load
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",  # the plan's metadata
)
#: more of them, where a CPU never comes: a table for --moe-permute-fusion, a tensor for --nccl-ub
ON_CUDA_ALONE = ("megatron.core.transformer.moe.token_dispatcher", "megatron.core.distributed.param_and_grad_buffer")


def install(device: str) -> None:
    """Put a device in the place of CUDA, before anything imports megatron.core.

    Args:
        device: its type.
    """
    # advice on CUDA streams, which `torchrun.prepare_environment` follows where there are any
    warnings.filterwarnings("ignore", "When using (sequence parallelism|async grad allreduce) it is recommended")
    # Megatron's jit_fuser is torch.compile: on a CPU it would start a C++ compiler for functions of a few lines.
    # To be set before torch._dynamo is imported, which the lines above do not do.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _torch_cuda_is(device)
    _megatron_on(device)
    if device == CPU:
        _megatron_on_cpu()


# ---- torch.cuda


class _Nothing:
    """Stands for a CUDA stream or event: every operation is done when its call returns."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _Nothing:
        return self

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = wait = record = synchronize = wait_stream

    def query(self) -> bool:
        return True


def _torch_cuda_is(device: str) -> None:
    """What Megatron asks of torch.cuda, answered for `device`.

    Each name gets a separate function object: torch._dynamo refuses one object under two torch.cuda names.
    """
    cuda = torch.cuda
    current = torch.device(CPU) if device == CPU else torch.device(device, 0)
    nothing = _Nothing()
    cuda.current_device = lambda: current  # buffers, p2p, embeddings, router: device=torch.cuda.current_device()
    for name in ("synchronize", "empty_cache", "set_device"):  # p2p, checkpoint writer
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("current_stream", "default_stream"):  # DDP, token dispatcher
        setattr(cuda, name, lambda *_, **__: nothing)
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.Stream = type("Stream", (_Nothing,), {})
    cuda.Event = type("Event", (_Nothing,), {})
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # model_parallel_cuda_manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.Tensor.cuda = lambda self, *_, **__: self.to(current)  # tied embeddings over pipeline stages


# ---- Megatron


def _megatron_on(device: str) -> None:
    """Retarget the literals, and give the generator of the CPU where Megatron wants that of a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Transformer Engine and Apex are not installed": we know
        for name in (*RETARGET, *(ON_CUDA_ALONE if device != CPU else ())):
            _retarget(importlib.import_module(name), literals(device))
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")  # warns too
        rng = importlib.import_module("megatron.core.tensor_parallel.random")

    # The tensor-parallel RNG tracker switches the state of torch.cuda's default generator: here the CPU's generator.
    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # ... and warns on leaving each fork, because the CPU generator moved: it is the one it was to move.
    logging.getLogger(rng.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _megatron_on_cpu() -> None:
    """Replace the functions that have no CPU meaning, or that gloo cannot do."""
    from hpcrl.trainer.collectives import gather_uneven

    moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    rope = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    embedding = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")
    yarn = importlib.import_module("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")

    # For a CPU tensor the stock function forgets as_numpy: all_to_all_single gets tensors for split sizes, TypeError.
    moe.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = _to_cpu

    # gloo refuses pieces of unequal length, which the dispatcher exchanges where several ranks share an expert.
    mappings._gather_along_first_dim = _unless_equal(mappings._gather_along_first_dim, gather_uneven)
    scatter = mappings._reduce_scatter_along_first_dim
    mappings._reduce_scatter_along_first_dim = _unless_equal(scatter, reduce_scatter_uneven)

    # The stock function pins memory, which needs CUDA.
    for module in (rope, embedding, yarn):
        module.get_pos_emb_on_this_cp_rank = rotary_table_of_cp_rank  # type: ignore[attr-defined]


def _unless_equal(stock: Callable[..., Any], unequal: Callable[..., Any]) -> Callable[..., Any]:
    """One of Megatron's two functions that take sizes of pieces, with ours where they are given."""

    def replaced(x: Any, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        alike = sizes is None or group.size() == 1
        return stock(x, group, None, use_global_buffer) if alike else unequal(x, group, sizes)

    return replaced


def _retarget(module: types.ModuleType, words: dict[str, str]) -> None:
    """Replace `words` in the code of every function and method that `module` defines."""
    for value in list(vars(module).values()):
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for member in list(vars(value).values()):
                _retarget_function(member, module.__name__, words)
        else:
            _retarget_function(value, module.__name__, words)


def _retarget_function(value: Any, module: str, words: dict[str, str]) -> None:
    value = getattr(value, "__func__", value)  # static and class methods
    if isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value) if callable(value) else value  # torch.no_grad() and other decorators
    if inspect.isfunction(value) and value.__module__ == module:
        value.__code__ = _swap(value.__code__, words)


def _swap(constant: Any, words: dict[str, str]) -> Any:
    """A constant of a code object with `words` replaced, also inside tuples and nested functions."""
    if isinstance(constant, str):
        return words.get(constant, constant)
    if isinstance(constant, tuple):
        return tuple(_swap(part, words) for part in constant)
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=_swap(constant.co_consts, words))
    return constant


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """maybe_move_tensor_to_cpu for tensors that are there already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def reduce_scatter_uneven(whole: torch.Tensor, group: Any, sizes: Sequence[int]) -> torch.Tensor:
    """The sum over ranks of their `whole`'s rows that belong to this rank.

    Args:
        sizes: rows of each rank.
    """
    mine = sizes[group.rank()]
    ranks = len(sizes)
    found = whole.new_empty(mine * ranks, *whole.shape[1:])
    dist.all_to_all_single(found, whole.contiguous(), [mine] * ranks, list(sizes), group=group)
    return found.view(ranks, mine, *whole.shape[1:]).sum(0)


def rotary_table_of_cp_rank(table: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """The two zig-zag chunks of a rotary table along `dim` that this context-parallel rank holds."""
    size = group.size()
    rank = group.rank()
    chunks = table.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)
