"""One adapter: scale B A x, added to what a linear layer of Megatron's gives, in every layout.

                 A                        between A and B                          B
    column       whole on every rank      gathered rows (SP), or as they are       this rank's rows of the layer
    row          this rank's columns      summed over ranks, its own rows (SP)     whole on every rank
    same         whole                    as it is                                 whole

What goes between ranks has as many columns as the adapter's rank, and it is summed once: the layer's own sum over
ranks does not see the adapter.  An expert's layers leave all communication to Megatron's dispatcher, which gathers rows
before the first and sums them after the second; the adapter's sums are parts of these then.

Invariants: gradients of what is whole on several ranks are summed over them once: by Megatron where rows are split
(`sequence_parallel` on the parameter), by `with_partial_gradients` for experts (`PARTIAL`); the norm of the gradient
counts such a parameter once; the layer's own result, parameters and names in checkpoints are what they are without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig

from hpcrl.models.family import Rule
from hpcrl.models.lora.matrices import AdaptedMatrix
from hpcrl.models.lora.settings import LoraSettings
from hpcrl.models.slicing import CUTS, Shapes

#: on a parameter: each rank of its expert-tensor-parallel group has a part of its gradient
PARTIAL = "hpcrl_partial_gradient"
SUFFIX = "_adapter"  #: of Megatron's names, behind a layer's: where its adapter is
How = Literal["column", "row", "same"]


class Adapter(torch.nn.Module):
    """The adapter of one linear layer, on one rank.

    Attributes:
        lora_A: [rank, columns of this rank] for each name of `AdaptedMatrix.inputs`.
        lora_B: [rows of this rank, rank], laid as the layer's rows.
        scale: of the product.
        is_on: whether the layer's result has it added.
    """

    mask: torch.Tensor | None

    def __init__(
        self,
        matrix: AdaptedMatrix,
        settings: LoraSettings,
        config: TransformerConfig,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        shapes: Shapes,
    ) -> None:
        """An adapter of zeros.

        Args:
            weight: the layer's, [rows of this rank, columns of this rank].
            group: the ranks that the layer is cut over.
        """
        super().__init__()
        self.training = False  # see `switched`
        self.matrix = matrix
        self.scale = settings.scale
        self.dropout = settings.dropout
        self.is_on = True
        self.group = group
        self.is_expert = matrix.base.expert is not None
        self.split_rows = config.sequence_parallel and not self.is_expert and group.size() > 1
        rows, columns = weight.shape
        new = {"dtype": weight.dtype, "device": weight.device}
        rank = settings.rank
        self.lora_A = torch.nn.ParameterDict()
        for name in matrix.inputs:  # one by one: of a dict given at once, torch sorts the names
            self.lora_A[name] = torch.nn.Parameter(torch.zeros(rank, columns, **new))
        self.lora_B = torch.nn.Parameter(torch.zeros(rows, rank, **new))
        cut = {"column": {"lora_B"}, "row": {"lora_A"}, "same": set()}[self.how]
        for name, parameter in self.named_parameters():
            _mark(parameter, name.partition(".")[0] in cut, self, weight)
        mask = _mask(matrix, rows, shapes, group.rank())
        self.register_buffer("mask", None if mask is None else mask.to(**new), persistent=False)

    @property
    def how(self) -> How:
        """How the layer is cut."""
        kind = self.matrix.base.kind
        return kind if kind in ("row", "same") else "column"  # type: ignore[return-value]

    def by_rule(self) -> Iterator[tuple[str, torch.nn.Parameter, Rule]]:
        """(name in the adapter, parameter, its rule): every A, then B."""
        names = [*(f"lora_A.{name}" for name in self.lora_A), "lora_B"]
        yield from zip(names, [*self.lora_A.values(), self.lora_B], self.matrix.rules, strict=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """B A x, without the scale.

        Args:
            x: what the layer gets, [..., columns of this rank].

        Returns:
            What it gives, [..., rows of this rank].
        """
        if self.dropout and self.training:  # not where gradients are: activations are computed again without them
            x = self._dropped(x)
        inputs = list(self.lora_A.values())
        between = F.linear(x, inputs[0] if len(inputs) == 1 else torch.cat(inputs))
        if not self.is_expert and self.group.size() > 1:
            between = self._over_ranks(between)
        return F.linear(between, self.spread())

    def spread(self) -> torch.Tensor:
        """B with columns for each A: [rows of this rank, rank x number of A]; 0 where a row has another A, or none."""
        if self.mask is None:
            return self.lora_B
        return (self.lora_B[:, None] * self.mask).flatten(1)

    def delta(self) -> torch.Tensor:
        """What the layer's weight would have to be increased by, fp32 [rows of this rank, columns of this rank]."""
        a = torch.cat([value.float() for value in self.lora_A.values()])
        return (self.spread().float() @ a).mul_(self.scale)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing: what Megatron saves is the model without adapters (`saved.py` has these)."""
        return {}

    def _over_ranks(self, between: torch.Tensor) -> torch.Tensor:
        if self.how == "column":
            if self.split_rows:
                return tensor_parallel.gather_from_sequence_parallel_region(between, group=self.group)
            return tensor_parallel.copy_to_tensor_model_parallel_region(between, group=self.group)
        if self.how == "row":
            if self.split_rows:
                return tensor_parallel.reduce_scatter_to_sequence_parallel_region(between, group=self.group)
            return tensor_parallel.reduce_from_tensor_model_parallel_region(between, group=self.group)
        return between

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        """Ranks that hold the same rows and columns leave out the same of them."""
        if self.group.size() == 1 or (self.how != "row" and not self.split_rows):
            return F.dropout(x, self.dropout)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return F.dropout(x, self.dropout)


def _mark(parameter: torch.nn.Parameter, cut: bool, adapter: Adapter, weight: torch.Tensor) -> None:
    """Tell Megatron how a parameter is spread over ranks: for its gradient's sums, and for its norm."""
    whole = not cut
    group = adapter.group
    marks: dict[str, Any] = {"allreduce": getattr(weight, "allreduce", True)}
    if adapter.is_expert:
        marks["tensor_model_parallel"] = True
        if whole and group.size() > 1:
            marks[PARTIAL] = True
            marks["shared"] = group.rank() > 0
    else:
        marks["tensor_model_parallel"] = cut
        marks["sequence_parallel"] = whole and adapter.split_rows
    for name, value in marks.items():
        setattr(parameter, name, value)


def _mask(matrix: AdaptedMatrix, rows: int, shapes: Shapes, rank: int) -> torch.Tensor | None:
    """1 where a row of B takes what an A gives: [rows, number of A, 1]; None where every row takes all there is."""
    inputs = len(matrix.inputs)
    if inputs == 1 and len(matrix.parts) == len(matrix.base.hf):
        return None
    mask = torch.zeros(rows, inputs, 1)
    for place in CUTS[matrix.base.kind].places(rank, (rows, 1), shapes):
        if place.tensor in matrix.parts:
            mask[place.inside[0], matrix.parts.index(place.tensor) if inputs > 1 else 0] = 1
    return mask


class GroupedAdapter(torch.nn.ModuleList):
    """The adapters of a layer that holds the matrices of several experts (Transformer Engine's grouped ones)."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        super().__init__(adapters)

    @property
    def scale(self) -> float:
        return self[0].scale

    @property
    def is_on(self) -> bool:
        return self[0].is_on

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """As `Adapter.sharded_state_dict`."""
        return {}

    def forward(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """B A x of each expert's rows.

        Args:
            x: [rows of all experts, columns], expert by expert.
            counts: rows of each.
        """
        return torch.cat([adapter(part) for adapter, part in zip(self, x.split(list(counts)), strict=True)])


def add_to(layer: torch.nn.Module, adapter: Adapter | GroupedAdapter) -> None:
    """Have `layer`, which returns (result, bias), add the adapter's to its result."""

    def hook(_: torch.nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        if not adapter.is_on:
            return output
        result, bias = output
        return torch.add(result, adapter(*args), alpha=adapter.scale), bias

    layer.register_forward_hook(hook)


def adapters_of(module: torch.nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Every adapter of a model, with its name in it."""
    for name, found in module.named_modules():
        if isinstance(found, Adapter):
            yield name, found


# ---- off for a while


@contextmanager
def switched(modules: Iterable[torch.nn.Module], name: Literal["is_on", "training"], inside: bool) -> Iterator[None]:
    """Inside, the adapters of these models are off (is_on), or leave out some of their inputs (training,
    --lora-dropout), or not; afterwards it is the other way round."""
    found = [adapter for module in modules for _, adapter in adapters_of(module)]
    for adapter in found:
        setattr(adapter, name, inside)
    try:
        yield
    finally:
        for adapter in found:
            setattr(adapter, name, not inside)


class BaseAsReference:
    """The reference of a run with adapters that began with the base: its policy with the adapters off."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules

    def swapped_in(self) -> AbstractContextManager[None]:
        """Inside, the policy's modules are the base; for forward passes alone."""
        return switched(self._modules, "is_on", False)


# ---- gradients


def with_partial_gradients(finalize: Callable[..., None]) -> Callable[..., None]:
    """Megatron's last act on gradients, and these sums after it."""

    def finalize_all(model: Sequence[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        gradients = [
            parameter.main_grad
            for chunk in model
            for parameter in chunk.parameters()
            if parameter.requires_grad and getattr(parameter, PARTIAL, False)
        ]
        if gradients:
            flat = torch.cat([gradient.view(-1) for gradient in gradients])
            dist.all_reduce(flat, group=parallel_state.get_expert_tensor_parallel_group())
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))

    return finalize_all


# ---- what is sent


def sent_values(modules: Sequence[torch.nn.Module], part: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes the values of that part of a policy (`model.Part`) of its parameters; None: they are those.

    Of an adapter that is "sent", B with the scale in it, as engines multiply; of weights that are "merged", W + scale B
    A: a rank that holds its rows of B and all of A, or all of B and its columns of A, can merge alone what it holds of
    W.  Computed in fp32 and rounded once, to the dtype of the weights, so that it is the same on every way to an engine
    or a file; between layouts products of A and B may differ by their own rounding.
    """
    if part not in ("merged", "sent"):
        return None
    merges = part == "merged"
    adapters: dict[int, Adapter] = {}
    for module in modules:
        for name, adapter in adapters_of(module):
            layer, _, number = name.partition(SUFFIX)
            weight = f"{layer}.weight{number.removeprefix('.')}"  # of one that holds the matrices of several experts
            adapters[id(module.get_parameter(weight) if merges else adapter.lora_B)] = adapter

    @torch.no_grad()
    def value(parameter: torch.Tensor) -> torch.Tensor:
        if (adapter := adapters.get(id(parameter))) is None:
            return parameter.detach()
        made = parameter.float() + adapter.delta() if merges else parameter.float() * adapter.scale
        return made.to(parameter.dtype)

    return value
