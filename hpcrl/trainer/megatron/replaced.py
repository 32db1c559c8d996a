"""Every function of Megatron-core that hpcrl replaces, on GPUs too: where, why, and which version does without.

`install` is the first thing a rank process calls.  Where there is no CUDA it also puts the CPU in its place
(`hpcrl/trainer/cpu/cpu_shim.py`).  The versions that were read are 0.16.1 and 0.20 as of August 2026.

Other files have parts of their own where Megatron lets one name a layer or a hook, and change nothing of Megatron's:
`packed_attention.py` (layers without Transformer Engine; 0.19 chooses another norm),
`delta_net_layer.py` (that of 0.16 refuses packed sequences, and all ask for the fla kernels), `mtp.py` and
`output_head.py` (a loss of some rows alone).  `fusions.py` only chooses among Megatron's switches.

Invariants: no other module of hpcrl replaces anything in a third-party package of the trainer; where CUDA is present
nothing of torch is replaced, and nothing of `hpcrl.trainer.cpu` is imported.  An entry goes with the last supported
version that needs it, once a profile on GPUs shows that nothing is lost.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import queue
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hpcrl.errors import HpcrlError

OPTIMIZER = "optimizer.distrib_optimizer:DistributedOptimizer"
#: function of Megatron-core, without "megatron.core." -> ours, without "hpcrl.trainer."
REPLACED = {
    # It asks the device for the length of each sequence, twice in every layer, where the rotation is not fused.
    # 0.20 waits for nothing where it is told the longest sequence.
    "models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd": "megatron.replaced:rotate_packed",
    # It waits for the device three times in every layer whose rows DeepEP brings to experts. So does 0.20.
    "transformer.moe.token_dispatcher:_DeepepManager._indices_to_multihot": "megatron.replaced:expert_table",
    # Stages wait for an idle device with every message, to learn a shape that packing has told all. So it is with 0.20.
    "pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes": "megatron.replaced:communicate_shapes",
    # The state of all data-parallel ranks is gathered on the first of them, in host memory; to load it, on each.
    # So it is with 0.20.
    f"{OPTIMIZER}.sharded_param_state_fully_reshardable": "checkpoint.optimizer_shards:param_state",
    f"{OPTIMIZER}.load_parameter_state_from_fully_reshardable": "checkpoint.optimizer_shards:load_into_optimizer",
    # It wants every key of torch AdamW's state, but the loader leaves `step` out: KeyError, with 0.20 too.
    f"{OPTIMIZER}._set_main_param_and_optimizer_states": "checkpoint.optimizer_shards:set_states",
}
STOCK: dict[str, Any] = {}  #: name -> Megatron's own, once it is replaced
_done: list[bool] = []  # filled by the first install() of the process


def install(device: str = "cpu") -> None:
    """Make this process ready for Megatron: call it before anything imports megatron.core. A second call does nothing.

    Args:
        device: the type of device that takes the place of CUDA where there is none.

    Raises:
        HpcrlError: if psutil is missing: Megatron does not declare it, and a checkpoint save would hang for ever.
    """
    if importlib.util.find_spec("psutil") is None:
        raise HpcrlError("psutil is not installed", "pip install psutil: Megatron's checkpoints need it")
    if _done:
        return
    _done.append(True)
    _quiet()
    if not torch.cuda.is_available():
        from hpcrl.trainer.cpu import cpu_shim

        cpu_shim.install(device)
    _repair()
    for name, ours in REPLACED.items():
        module, _, path = name.partition(":")
        *owner, attribute = path.split(".")
        place = attrgetter(*owner)(_import(module)) if owner else _import(module)
        module, _, function = ours.partition(":")
        found = getattr(importlib.import_module(f"hpcrl.trainer.{module}"), function)
        if getattr(place, attribute) is not found:
            STOCK[attribute] = getattr(place, attribute)
            setattr(place, attribute, found)


def _repair() -> None:
    """Names that Megatron-core lacks, or has wrong, without Transformer Engine; and a queue."""
    # Until 0.19: the router names it whether or not it is there: NameError in every MoE forward.
    router = _import("transformer.moe.moe_utils")
    router.te_general_gemm = getattr(router, "te_general_gemm", None)
    # Until 0.19: it takes Transformer Engine for installed wherever its wrappers can be imported, and asks each
    # projection whether it is of a class that is none: TypeError in every layer of multi-head latent attention.
    latent = _import("transformer.multi_latent_attention")
    if not isinstance(getattr(latent, "TELinear", None), type):
        latent.HAVE_TE = False
    # 0.20 too: the writer's result queue comes from a spawned Manager process: 2 s on the first save of each rank, a
    # re-import of __main__, and an orphan when the rank is killed.  Our saves are synchronous: one here will do.
    _import("dist_checkpointing.strategies.filesystem_async")._results_queue = queue.Queue()


def _import(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Transformer Engine and Apex are not installed": we know
        return importlib.import_module(f"megatron.core.{name}")


def _quiet() -> None:
    """Silence Megatron's messages that every rank prints and no user can act upon."""
    for message in (
        r"`torch\.distributed\.\w+` is deprecated",  # Megatron's collectives
        "`load_state_dict` is deprecated",  # its way to load a checkpoint
        "Please use DTensor instead",  # torch, of what Megatron saves
        "If you are using transformer_engine as the transformer impl",  # recompute
        r"The \.grad attribute of a Tensor that is not a leaf",  # its zero_grad
        ".*but tensor model parallel size is 1",  # of experts, with ETP 1
        "moe_enable_deepep is deprecated",  # slime's scripts and recipes have it
    ):
        warnings.filterwarnings("ignore", message)
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)  # "Implicit initialization"
    saving = logging.getLogger("megatron.core.dist_checkpointing.strategies.torch")
    saving.addFilter(
        lambda record: "async save is deprecated" not in record.getMessage()
    )  # the other is not part of Megatron


def expert_table(manager: Any, indices: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tables [rows, experts]: bool which experts a row is for, and float32 their probabilities, 0 for the others.

    As Megatron's own, values and gradients, and asks nothing of the device.

    Args:
        manager: Megatron's; `num_local_experts` is read.
        indices: int64 [rows, choices], experts of this rank, or -1.
        probs: [rows, choices].
    """
    experts = manager.num_local_experts
    columns = torch.where(indices < 0, experts, indices)  # one more column for what is not this rank's
    empty = probs.new_zeros(len(indices), experts + 1, dtype=torch.float32)
    chosen = torch.zeros_like(empty, dtype=torch.bool).scatter(1, columns, True)
    return chosen[:, :experts], empty.scatter(1, columns, probs.float())[:, :experts]


# ---- rotary embedding of packed sequences

#: boundaries -> {(CP ranks, this one): the position of every row}: all layers of a micro-batch have the same boundaries
_positions: Any = WeakTensorKeyDictionary()


def positions(bounds: torch.Tensor, rows: int, cp_size: int = 1, cp_rank: int = 0) -> torch.Tensor:
    """Position of each of a CP rank's rows within its own sequence, int64 [rows], on the device of `bounds`.

    Args:
        bounds: [sequences + 1], 0 and where each ends, over all CP ranks; each a multiple of 2 x `cp_size`.
        rows: that this rank has.
    """
    known = _positions.setdefault(bounds, {})
    if (cp_size, cp_rank) not in known:
        known[cp_size, cp_rank] = _of_rows(bounds.long(), rows, cp_size, cp_rank)
    return known[cp_size, cp_rank]


def _of_rows(bounds: torch.Tensor, rows: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    own = bounds // cp_size  # where each sequence's part ends among this rank's rows
    row = torch.arange(rows, device=bounds.device)
    sequence = torch.searchsorted(own, row, right=True) - 1
    within = row - own[sequence]
    if cp_size == 1:
        return within
    chunk = (own[sequence + 1] - own[sequence]) // 2  # a rank has chunks r and 2 CP - 1 - r
    second = within >= chunk
    return within + chunk * torch.where(second, 2 * cp_size - 2 - cp_rank, cp_rank)


def rotate_packed(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool | None = None,
    mscale: float = 1.0,
    cp_group: Any = None,
    mla_rotary_interleaved: bool = False,
) -> torch.Tensor:
    """Packed rows t [t, heads, d], rotated.

    The arguments for multi-latent attention have one name up to Megatron-core 0.18, and another from 0.19 on: its
    columns lie in pairs (0, 1), (2, 3), ..., and come out as halves.

    Args:
        cu_seqlens: boundaries with padding, not split by CP.
        freqs: [longest, 1, 1, rotary d].
    """
    if multi_latent_attention or mla_rotary_interleaved:
        t = torch.cat((t[..., ::2], t[..., 1::2]), dim=-1)
    rows = positions(cu_seqlens, len(t), cp_group.size(), cp_group.rank())
    cos, sin = ((f(freqs[:, 0]) * mscale).to(t.dtype) for f in (torch.cos, torch.sin))  # [longest, 1, rotary d]
    rotated = t[..., : cos.size(-1)]
    rest = t[..., cos.size(-1) :]
    if rotary_interleaved:  # pairs (0, 1), (2, 3), ...
        other = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    else:  # pairs (0, d/2), (1, d/2 + 1), ...: the sign goes into the table, the halves change places
        half = cos.size(-1) // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        other = rotated.roll(half, -1)
    rotated = rotated * cos[rows] + other * sin[rows]
    return torch.cat((rotated, rest), dim=-1) if rest.size(-1) else rotated


# ---- shapes of what goes between pipeline stages

Shape = list[int]
_passes: list[PassShapes] = []  # that under way, if its shapes are known


class PassShapes:
    """Shapes of what goes between stages in one pass, by micro-batch."""

    def __init__(self, rows: Sequence[int], width: int) -> None:
        self._shapes = [[count, 1, width] for count in rows]
        self._done: Counter[str] = Counter()

    def expect(self, way: str) -> Shape:
        """That of the next tensor on this way."""
        self._done[way] += 1
        return self._shapes[self._done[way] - 1]

    def check(self, way: str, sent: torch.Tensor | None) -> None:
        """Raise HpcrlError if the next tensor on this way has another shape than its receiver expects."""
        if sent is not None and list(sent.shape) != (expected := self.expect(way)):
            raise HpcrlError(
                f"a pipeline stage sends {list(sent.shape)} where the next one expects {expected}",
                "--custom-model-provider-path must give activations of [rows, 1, hidden size]",
            )


@contextmanager
def known_shapes(rows: Sequence[int], width: int) -> Iterator[None]:
    """Around a pass without virtual stages.

    Args:
        rows: of each micro-batch, those that a rank has of an activation.
        width: its columns.
    """
    _passes.append(PassShapes(rows, width))
    try:
        yield
    finally:
        _passes.pop()


def communicate_shapes(
    communicator: Any,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,
    recv_next: bool,
) -> tuple[Shape, Shape]:
    """Shapes of the activation that comes from the previous stage and the gradient that comes from the next; of what
    does not come, Megatron's own answer."""
    if not _passes:
        return STOCK["_communicate_shapes"](communicator, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
    shapes = _passes[-1]
    shapes.check("to next", tensor_send_next)
    shapes.check("to previous", tensor_send_prev)
    nothing = [0, 0, 0]
    return (
        shapes.expect("from previous") if recv_prev else nothing,
        shapes.expect("from next") if recv_next else nothing,
    )
