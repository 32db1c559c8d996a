"""Which matrices of a model have an adapter, and the names, shapes and cuts of its A and B.

    for matrix in adapted(family.tensors(config), settings):
        matrix.rules          # (Megatron name, Rule) of each of its parameters

An adapter lies next to its Megatron linear layer: of `self_attention.linear_qkv` it is
`self_attention.linear_qkv_adapter`, with one `lora_A.NAME` for each Hugging Face matrix of the layer (q_proj, ...; one
for all, `lora_A.shared`, where inputs are shared) and one `lora_B`, whose rows are laid as the layer's own.

A is cut as the layer's columns are and B as its rows, so that both go over the same ways as all other parameters: A of
a column-parallel layer and B of a row-parallel one are whole on every tensor-parallel rank.

Invariants: names are PEFT's, without "base_model.model."; a target that names nothing is an error, and so is one that
names what has no adapter (embeddings, output layer, routers, norms, layers that predict further tokens).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hpcrl.errors import UsageError
from hpcrl.models.family import Rule
from hpcrl.models.lora.settings import LoraSettings

ALL = "all-linear"
PART = "_adapter."  #: behind a layer's name
SHARED = "shared"
#: Megatron's linear layers of a decoder, and their weights
_LINEAR = re.compile(r"^decoder\.layers\.\d+\.(?:.*\.)?(?:linear_\w+|in_proj|out_proj)\.weight\d*$")
_WEIGHT = re.compile(r"\.weight(\d*)$")


@dataclass(frozen=True)
class AdaptedMatrix:
    """One linear layer of Megatron's with an adapter.

    Attributes:
        base: its rule.
        parts: which of its Hugging Face matrices have an adapter.
        rank: of the adapter.
        shared_inputs: they have one A together.
    """

    base: Rule
    parts: tuple[int, ...]
    rank: int
    shared_inputs: bool

    @property
    def layer(self) -> str:
        """Megatron's name of the layer, of one of several experts in one layer with "." and its number behind it."""
        return _WEIGHT.sub(lambda match: f".{match[1]}" if match[1] else "", self.base.megatron)

    @property
    def prefix(self) -> str:
        """What the names of its parameters begin with."""
        number = f"{match[1]}." if (match := _WEIGHT.search(self.base.megatron)) and match[1] else ""
        return _WEIGHT.sub(PART, self.base.megatron) + number

    @property
    def is_row_parallel(self) -> bool:
        """Columns are cut over tensor-parallel ranks."""
        return self.base.kind == "row"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its A in `lora_A`."""
        if self.shared_inputs and len(self.base.hf) > 1:
            return (SHARED,)
        return tuple(leaf(self.base.hf[part]) for part in self.parts)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Of every A, in the order of `inputs`, and of B.

        B has rows, and names, for all Hugging Face matrices of the layer; those without an adapter are 0, and
        `absent` tells their names.
        """
        first = [lora_name(self.base.hf[part], "A") for part in self.parts[: len(self.inputs)]]
        a_kind = "row" if self.is_row_parallel else "same"
        b_kind = "same" if self.is_row_parallel else self.base.kind
        expert = self.base.expert
        a = [
            Rule(f"{self.prefix}lora_A.{name}", a_kind, (hf,), expert=expert)
            for name, hf in zip(self.inputs, first, strict=True)
        ]
        b = Rule(f"{self.prefix}lora_B", b_kind, tuple(lora_name(hf, "B") for hf in self.base.hf), expert=expert)
        return (*a, b)

    @property
    def absent(self) -> set[str]:
        """Names of B's that no file and no engine has."""
        return {lora_name(hf, "B") for part, hf in enumerate(self.base.hf) if part not in self.parts}

    @property
    def copies(self) -> dict[str, str]:
        """Name of an A that is another one once more -> that one."""
        names = [lora_name(self.base.hf[part], "A") for part in self.parts]
        return dict.fromkeys(names[1:], names[0]) if len(self.inputs) < len(names) else {}


def adapted(tensors: Iterable[tuple[str, Rule]], settings: LoraSettings) -> list[AdaptedMatrix]:
    """The layers of a model that have an adapter.

    A target names a matrix as Hugging Face or Megatron does: by its last word (q_proj, linear_qkv), by several
    (mlp.down_proj), with a * for any part between them; all-linear are all that can have one.  Several
    spellings of a layer in the rules (of Transformer Engine's and of Megatron's own) are several here too.

    Args:
        tensors: `Family.tensors` of the model.

    Raises:
        UsageError: names a target, or an exclusion, that no matrix goes by.
    """
    found: list[AdaptedMatrix] = []
    used: set[str] = set()
    for _, rule in tensors:
        if not _LINEAR.match(rule.megatron):
            continue
        parts = []
        for number, hf in enumerate(rule.hf):
            names = (_WEIGHT.sub("", rule.megatron), _WEIGHT.sub("", hf))
            wanted = {target for target in settings.targets if target == ALL or _names(target, names)}
            unwanted = {target for target in settings.excluded if _names(target, names)}
            used |= wanted | unwanted
            if wanted and not unwanted:
                parts.append(number)
        if parts:
            found.append(AdaptedMatrix(rule, tuple(parts), settings.rank, settings.shared_inputs))
    for flag, given in (("--target-modules", settings.targets), ("--exclude-modules", settings.excluded)):
        if idle := [target for target in given if target not in used]:
            raise UsageError(f"{flag} {idle[0]} matches no linear layer of this model", f"there are: {_known(tensors)}")
    if not found:
        raise UsageError("--target-modules and --exclude-modules leave no layer with an adapter", "change one of them")
    return found


def adapter_tensors(matrices: Iterable[AdaptedMatrix]) -> Iterator[tuple[str, Rule]]:
    """(Megatron name, rule) of every parameter of these adapters."""
    for matrix in matrices:
        yield from ((rule.megatron, rule) for rule in matrix.rules)


def lora_name(weight: str, which: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> model.layers.0.self_attn.q_proj.lora_A.weight."""
    return f"{weight.removesuffix('.weight')}.lora_{which}.weight"


def leaf(weight: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> q_proj."""
    return weight.removesuffix(".weight").rpartition(".")[2]


def is_adapter(name: str) -> bool:
    """Whether a Megatron name is that of a parameter of an adapter."""
    return PART in name


def _names(target: str, names: Sequence[str]) -> bool:
    for name in names:
        if name == target or name.endswith(f".{target}"):
            return True
        if "*" in target and (fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")):
            return True
    return False


def _known(tensors: Iterable[tuple[str, Rule]]) -> str:
    linear = [rule for _, rule in tensors if _LINEAR.match(rule.megatron)]
    return ", ".join(dict.fromkeys(leaf(hf) for rule in linear for hf in rule.hf))
