"""Who holds which part of the model's parameters, or of its adapters', by rule.

Invariant: what all ranks must agree on (shapes, dtypes, owners) is one table that one sum over the ranks fills; nothing
is pickled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hpcrl.errors import HpcrlError
from hpcrl.models.family import Rule
from hpcrl.models.lora.matrices import is_adapter
from hpcrl.models.shared.mtp import is_head
from hpcrl.models.slicing import CUTS, Shapes
from hpcrl.trainer.global_names import in_whole_model
from hpcrl.trainer.lora.layer import sent_values
from hpcrl.weights.pieces.elements import OwnTensor
from hpcrl.weights.pieces.planning import HeldTensor
from hpcrl.weights.redistribution.layouts import Pattern, held_parts

if TYPE_CHECKING:
    from hpcrl.trainer.megatron.model import Policy

FACTS = 5  #: numbers of a parameter in the table that ranks agree on: dtype, dimensions, up to three lengths
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class HeldParameter:
    """What every rank knows of one parameter: its rule, the shape of one rank's part, dtype, and who holds the parts.

    Attributes:
        copies: for each part, in order of TP (of an expert's: ETP) rank, the global ranks that hold it.
    """

    rule: Rule
    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: tuple[tuple[int, ...], ...]

    @property
    def owners(self) -> tuple[int, ...]:
        """The first that holds each part: who sends it to rank 0."""
        return tuple(ranks[0] for ranks in self.copies)

    @property
    def nbytes(self) -> int:
        """Of all parts together."""
        return math.prod(self.shape) * self.dtype.itemsize * len(self.copies)


def held_table(policy: Policy) -> list[HeldParameter]:
    """Every parameter that some rank holds, agreed among all ranks as a table of numbers.

    Raises:
        HpcrlError: if no rank holds a part of one.
    """
    ranks = policy.ranks
    mine = own_parameters(policy)
    rules = [rule for _, rule in policy.tensors()]
    sizes = [ranks.tp_size if rule.expert is None else ranks.etp_size for rule in rules]
    numbers = torch.full((len(rules), FACTS + ranks.world), -1, dtype=torch.int32)
    for row, rule in zip(numbers, rules, strict=True):
        if rule.megatron not in mine:
            continue
        parameter = mine[rule.megatron][1]
        known = [DTYPES.index(parameter.dtype), parameter.dim(), *parameter.shape]
        row[: len(known)] = torch.tensor(known)
        row[FACTS + ranks.rank] = ranks.tp_rank if rule.expert is None else ranks.etp_rank
    numbers = numbers.to(ranks.device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    found = []
    groups: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
    for rule, size, (dtype, dims, *rest) in zip(rules, sizes, numbers.tolist(), strict=True):
        parts = rest[FACTS - 2 :]
        if dtype < 0:
            continue
        key = (size, *parts)
        if key not in groups:
            groups[key] = tuple(
                tuple(rank for rank, part in enumerate(parts) if part == number) for number in range(size)
            )
        if () in groups[key]:
            raise HpcrlError(f"no rank holds part {groups[key].index(())} of {rule.megatron}")
        found.append(HeldParameter(rule, tuple(rest[:dims]), DTYPES[dtype], groups[key]))
    return found


@torch.no_grad()
def holdings(policy: Policy, heads: bool = False) -> tuple[dict[str, HeldTensor], dict[str, OwnTensor]]:
    """(who holds which part of each Hugging Face tensor, this rank's own parts), by name; collective.

    A tied output layer is one more copy of the embedding.  Own parts are the parameters themselves,
    or what is made of them when they are sent.

    Args:
        heads: with the layers that predict further tokens, where the model has them.
    """
    mine = own_parameters(policy)
    value = sent_values(policy.modules, policy.part)
    copies = again(policy)
    rank = policy.ranks.rank
    known: dict[tuple[Any, ...], list[tuple[tuple[int, ...], Pattern]]] = {}
    held: dict[str, HeldTensor] = {}
    own: dict[str, OwnTensor] = {}
    for entry in held_table(policy):
        rule = entry.rule
        if is_head(rule.megatron) and not heads:
            continue
        shapes = shapes_of(policy, entry.rule)
        key = (rule.kind, entry.shape, entry.copies, shapes)
        if key not in known:
            known[key] = held_parts(rule.kind, entry.shape, shapes, entry.copies)
        for which, (name, (shape, parts)) in enumerate(zip(rule.hf, known[key], strict=True)):
            twin = held.get(name)
            held[name] = HeldTensor(shape, parts if twin is None else (*twin.parts, *parts))
            if rule.megatron in mine and name not in own:
                part = next(number for number, ranks in enumerate(entry.copies) if rank in ranks)
                places = CUTS[rule.kind].places(part, entry.shape, shapes)
                own[name] = OwnTensor(mine[rule.megatron][1], places, which, shape, value)
            for copy in copies.get(name, ()):
                held[copy] = held[name]
                if name in own:
                    own[copy] = own[name]
    absent = absent_tensors(policy)
    return tuple({name: entry for name, entry in found.items() if name not in absent} for found in (held, own))


def again(policy: Policy) -> dict[str, list[str]]:
    """A tensor of an adapter that several of its matrices have -> its further names."""
    found: dict[str, list[str]] = {}
    for matrix in policy.matrices if policy.of_adapters else ():
        for copy, name in matrix.copies.items():
            found.setdefault(name, []).append(copy)
    return found


def absent_tensors(policy: Policy) -> set[str]:
    """Tensors of an adapter that no file and no engine has."""
    matrices = policy.matrices if policy.of_adapters else ()
    return {name for matrix in matrices for name in matrix.absent}


def part_group(policy: Policy, expert: bool) -> dist.ProcessGroup:
    """The ranks that hold the parts of this rank's parameters: of experts, or of all others."""
    if expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def own_parameters(policy: Policy) -> dict[str, tuple[Rule, torch.Tensor]]:
    """This rank's parameters with their rules, by name.

    Raises:
        HpcrlError: if the family has no rule for one.
    """
    rules = dict(policy.tensors())
    held = {
        in_whole_model(module, name, policy.ranks): value
        for module in policy.modules
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and "_extra_state" not in name
        if not (policy.value_head and name.startswith("output_layer."))  # no Hugging Face model has it
        if is_adapter(name) == policy.of_adapters
        if policy.heads or not is_head(name)  # which the policy has, and nothing is to be done with
    }
    if unknown := sorted(held.keys() - rules.keys()):
        raise HpcrlError(f"family {policy.family.model_type} has no rule for {some_of(unknown)}")
    return {name: (rules[name], value) for name, value in held.items()}


def shapes_of(policy: Policy, rule: Rule) -> Shapes:
    ranks = policy.ranks
    parts = ranks.tp_size if rule.expert is None else ranks.etp_size
    return Shapes.from_config(vars(policy.config), policy.vocab_size, parts)


def some_of(items: list[str], between: str = ", ") -> str:
    rest = f" and {len(items) - 4} more" if len(items) > 4 else ""
    return between.join(items[:4]) + rest
