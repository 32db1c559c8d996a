"""An adapter's first values, or those of files; and which are its.

    init_adapter(policy, seed)             # PEFT's: A uniform within 1 / root of the columns, B zero
    fill(policy, {"model.layers.0.self_attn.q_proj.lora_A.weight": tensor, ...})

First values are those of kaiming_uniform with a = root of 5, as PEFT's.  They are drawn matrix by matrix, by seed and
name, so that they are the same in every layout.

Invariant: every tensor that is given has a place, and every place gets one, or it is an error that names those which
do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpcrl.config.options import Options
from hpcrl.errors import DataError
from hpcrl.models.lora.matrices import AdaptedMatrix
from hpcrl.models.slicing import CUTS, Shapes
from hpcrl.trainer.collectives import agree
from hpcrl.trainer.lora.layer import Adapter, adapters_of

if TYPE_CHECKING:
    from hpcrl.trainer.megatron.model import Policy


def begin_adapter(policy: Policy, options: Options) -> str:
    """Give a new run's adapter its values; returns a text that names them.  Collective."""
    if options.lora_adapter_path is None:
        init_adapter(policy, options.seed)
        return "begins with a new adapter"
    from hpcrl.models.lora.peft import read_adapter

    assert policy.lora is not None
    directory = Path(options.lora_adapter_path)
    agree(lambda: fill(policy, read_adapter(directory, policy.lora), str(directory)))
    return f"begins with the adapter of {directory}"


@torch.no_grad()
def init_adapter(policy: Policy, seed: int) -> None:
    """PEFT's first values, the same in every layout."""
    for adapter, shapes in _adapters(policy):
        adapter.lora_B.zero_()
        for _, parameter, rule in list(adapter.by_rule())[:-1]:
            cut = CUTS[rule.kind]
            (whole,) = cut.full(tuple(parameter.shape), shapes)
            value = first_a(rule.hf[0], whole[0], whole[1], seed)
            parameter.copy_(cut.part([value], adapter.group.rank(), tuple(parameter.shape), shapes))
    policy.optimizer.reload_model_params()


@torch.no_grad()
def without_values(policy: Policy) -> None:
    """Every B is 0: with it the adapter does nothing."""
    for adapter, _ in _adapters(policy):
        adapter.lora_B.zero_()


def first_a(name: str, rank: int, columns: int, seed: int) -> torch.Tensor:
    """The first values of an A: fp32 [rank, columns].

    Args:
        name: its own, in files.
    """
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1 / sqrt(columns)
    return torch.empty(rank, columns).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def fill(policy: Policy, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """The values of files into this rank's adapters.

    Args:
        tensors: whole ones, by PEFT's names without "base_model.model.".
        source: where they are from, for errors.

    Raises:
        DataError: names tensors that are missing, that no matrix of this run's is for, or of another shape.
    """
    _check(policy.matrices, tensors, source)
    for adapter, shapes in _adapters(policy):
        rank = adapter.group.rank()
        for _, parameter, rule in adapter.by_rule():
            cut = CUTS[rule.kind]
            given = []
            for name, wanted in zip(rule.hf, cut.full(tuple(parameter.shape), shapes), strict=True):
                given.append(tensors.get(name, torch.zeros(wanted)))
                if tuple(given[-1].shape) != wanted:
                    raise DataError(
                        f"{source}: {name} is {list(given[-1].shape)}, this run's is {list(wanted)}",
                        "is --lora-rank the adapter's, and --hf-checkpoint its base?",
                    )
            parameter.copy_(cut.part(given, rank, tuple(parameter.shape), shapes))
    policy.optimizer.reload_model_params()


def _check(matrices: list[AdaptedMatrix], tensors: Mapping[str, torch.Tensor], source: str) -> None:
    wanted: set[str] = set()
    for matrix in matrices:
        wanted |= {name for rule in matrix.rules for name in rule.hf} - matrix.absent | matrix.copies.keys()
        for copy, name in matrix.copies.items():
            if {copy, name} <= tensors.keys() and not torch.equal(tensors[copy], tensors[name]):
                raise DataError(f"{source}: {copy} is not {name}", "such an adapter is of --lora-type canonical_lora")
    for what, names in (("lacks", wanted - tensors.keys()), ("holds in excess", tensors.keys() - wanted)):
        if names:
            some = sorted(names)
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            raise DataError(f"{source} {what} {', '.join(some[:3])}{more}", "give the --target-modules of that adapter")


def _adapters(policy: Policy) -> Iterator[tuple[Adapter, Shapes]]:
    for module in policy.modules:
        for _, adapter in adapters_of(module):
            yield adapter, Shapes.from_config(vars(policy.config), policy.vocab_size, adapter.group.size())
