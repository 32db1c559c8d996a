"""Megatron-core on CPU tensors and gloo, and its checkpoints with torch's own AdamW.

Megatron-core (0.16 to 0.19) is written for CUDA: it asks torch.cuda for the current device, allocates with the literal
"cuda", and names tensor types like 'torch.cuda.FloatTensor'.  `install` is the first thing a rank process calls.  Where
there is no CUDA it puts the CPU in its place, or in tests a device that knows shapes alone
(hpcrl/planning/rehearsal/device.py).

Invariants: where CUDA is present nothing of torch is replaced, and of Megatron's computing alone what would wait for
the device in every layer or with every message: the rotary embedding of packed sequences
(trainer/megatron/packed_rope.py), the table of experts of rows that DeepEP brought (trainer/megatron/expert_table.py),
shapes that pipeline stages exchange (trainer/megatron/pipeline_shapes.py); every replacement says what breaks without
it; no other module of hpcrl replaces anything in a third-party package of the trainer.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import queue
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from hpcrl.errors import HpcrlError

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

_done: list[bool] = []  # filled by the first install() of the process


def install(device: str = CPU) -> None:
    """Make this process ready for Megatron: call it before anything imports megatron.core. A second call does nothing.

    Args:
        device: the type of device that takes the place of CUDA where there is none.

    Raises:
        HpcrlError: if psutil is missing: Megatron does not declare it, and a checkpoint save would hang for ever.
    """
    if importlib.util.find_spec("psutil") is None:
        raise HpcrlError("psutil is not installed", "pip install psutil: Megatron's checkpoints need it")
    import torch

    if _done:
        return
    _done.append(True)
    _quiet()
    if not torch.cuda.is_available():
        _quiet_on_cpu()
        # Megatron's jit_fuser is torch.compile: on a CPU it would start a C++ compiler for functions of a few lines.
        # To be set before torch._dynamo is imported, which the lines above do not do.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        _torch_cuda_is(device)
        _megatron_on(device)
        if device == CPU:
            _megatron_on_cpu()
    _without_waits()
    _router_repair()
    _latent_repair()
    _checkpoint_repairs()


def _quiet() -> None:
    """Silence Megatron's messages that every rank prints and no user can act upon."""
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
    )  # Megatron's collectives
    warnings.filterwarnings("ignore", r"`load_state_dict` is deprecated", FutureWarning)  # its way to load a checkpoint
    warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)  # torch, of what Megatron saves
    warnings.filterwarnings(
        "ignore", "If you are using transformer_engine as the transformer impl", UserWarning
    )  # recompute
    warnings.filterwarnings(
        "ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning
    )  # its zero_grad
    warnings.filterwarnings("ignore", ".*but tensor model parallel size is 1", UserWarning)  # of experts, with ETP 1
    warnings.filterwarnings(
        "ignore", "moe_enable_deepep is deprecated", UserWarning
    )  # slime's scripts and recipes have it
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)  # "Implicit initialization"
    saving = logging.getLogger("megatron.core.dist_checkpointing.strategies.torch")
    saving.addFilter(
        lambda record: "async save is deprecated" not in record.getMessage()
    )  # the other is not part of Megatron


def _quiet_on_cpu() -> None:
    """Advice on CUDA streams, which `torchrun.prepare_environment` follows where there are any."""
    warnings.filterwarnings("ignore", "When using sequence parallelism it is recommended", UserWarning)
    warnings.filterwarnings("ignore", "When using async grad allreduce it is recommended", UserWarning)


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
    import torch

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
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Transformer Engine and Apex are not installed": we know
        for name in RETARGET:
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
    from hpcrl.trainer import collectives
    from hpcrl.trainer.megatron import packed_rope

    moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    rope = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    embedding = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")
    yarn = importlib.import_module("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")

    # For a CPU tensor the stock function forgets as_numpy: all_to_all_single gets tensors for split sizes, TypeError.
    moe.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = _to_cpu

    # gloo refuses pieces of unequal length, which the dispatcher exchanges where several ranks share an expert.
    mappings._gather_along_first_dim = _unless_equal(mappings._gather_along_first_dim, collectives.gather_uneven)
    scatter = mappings._reduce_scatter_along_first_dim
    mappings._reduce_scatter_along_first_dim = _unless_equal(scatter, collectives.reduce_scatter_uneven)

    # The stock function pins memory, which needs CUDA.
    for module in (rope, embedding, yarn):
        module.get_pos_emb_on_this_cp_rank = packed_rope.rotary_table_of_cp_rank  # type: ignore[attr-defined]


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
    import torch

    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


# ---- with CUDA too


def _without_waits() -> None:
    """Put what asks nothing of the device in place of what holds the host in every layer, or with every message."""
    from hpcrl.trainer.megatron import expert_table, packed_rope, pipeline_shapes

    packed_rope.install()
    expert_table.install()
    pipeline_shapes.install()


def _router_repair() -> None:
    """Up to 0.16 the router names te_general_gemm whether or not Transformer Engine is there: NameError in every MoE
    forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None


def _latent_repair() -> None:
    """0.16 takes Transformer Engine for installed wherever its wrappers can be imported, and asks each projection
    whether it is of a class that is none: TypeError in every layer of multi-head latent attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        latent = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    if not isinstance(getattr(latent, "TELinear", None), type):
        latent.HAVE_TE = False


# ---- checkpoints of Megatron's optimizers whose Adam is torch.optim.AdamW (no Transformer Engine, no apex)


def _checkpoint_repairs() -> None:
    """Repairs that also hold with CUDA."""
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    shards = importlib.import_module("hpcrl.trainer.checkpoint.optimizer_shards")
    # Megatron gathers the state of all data-parallel ranks on the first of them, in host memory; to load it, on each.
    optimizer.sharded_param_state_fully_reshardable = shards.param_state
    optimizer.load_parameter_state_from_fully_reshardable = shards.load_into_optimizer
    stock = optimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # The loader leaves `step` out, the setter wants every key of torch AdamW's state: KeyError 'step'.
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        stock(self, model_param, {**tensors, "step": state["step"]} if "step" in state else tensors)

    optimizer._set_main_param_and_optimizer_states = set_states
    # The writer's result queue comes from a spawned Manager process: 2 s on the first save of each rank, a re-import of
    # __main__, and an orphan when the rank is killed.  Our saves are synchronous: a queue of this process will do.
    writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    writer._results_queue = queue.Queue()


NO_PARAMETER = "no parameter"  #: in place of one, in the state of an Adam that has none


def _torch_adams(optimizer: Any) -> Iterator[Any]:
    """The torch Adam(W) optimizers inside a Megatron optimizer; of one that is on the CPU, those in it.

    None of one that is partly there and partly on the GPU, where it is not torch's: Megatron fills that one itself.
    """
    import torch

    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(leaf.optimizer, "sub_optimizers", [leaf.optimizer])
        if all(isinstance(one, torch.optim.Adam) for one in inner):
            yield from inner


def before_load(optimizer: Any) -> None:
    """Fill empty Adam states; call it before `sharded_state_dict(..., is_loading=True)`, which asserts that all have a
    step.

    So it does of an Adam without parameters, such as the experts' in a pipeline stage whose layers are all dense: that
    one gets the step of the rank's others, without a tensor.
    """
    import torch

    adams = list(_torch_adams(optimizer))
    for adam in adams:
        for group in adam.param_groups:
            for param in group["params"]:
                if not adam.state[param]:
                    zeros = {key: torch.zeros_like(param.data) for key in ("exp_avg", "exp_avg_sq")}
                    adam.state[param] = {"step": torch.tensor(0.0), **zeros}
    filled = [any(group["params"] for group in adam.param_groups) for adam in adams]
    steps = [state["step"] for adam, full in zip(adams, filled, strict=True) if full for state in adam.state.values()]
    for adam, full in zip(adams, filled, strict=True):
        if not full:
            adam.state[NO_PARAMETER] = {"step": steps[0].clone() if steps else torch.tensor(0.0)}
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        if adams and hasattr(leaf.optimizer, "sub_optimizers"):
            leaf.optimizer._sync_sub_optimizers_state_to_hdo()


def after_load(optimizer: Any) -> None:
    """Give each parameter its own step tensor; call it after `load_state_dict`.

    The stock loader gives one tensor to all parameters, AdamW counts it up once for each, and its bias correction is
    silently wrong.
    """
    for adam in _torch_adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()
