"""Which recipe fits its GPUs, and the cheapest change that makes one fit that does not.

    found = misfit(options, family, config, 80.0)
    found.what, found.change, found.certain

Invariant: a change is named only if the estimate of the changed options fits, and Megatron's layout divides the model;
of those that do, the first in `CHANGES`, which are in the order of what they cost a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.groups import planned
from hpcrl.models.family import Config, Family
from hpcrl.planning.formulas.activations import RECOMPUTE, longest_sample, tokens_per_gpu
from hpcrl.planning.formulas.training_memory import GIB, fullest_rank

#: flags, and the options that they make of others; None where they would change nothing
Change = tuple[str, Options]


@dataclass(frozen=True)
class Misfit:
    """A trainer rank that does not fit.

    Attributes:
        what: the phase, the bytes and the heaviest term, as text.
        change: the flags of the cheapest change; "" if none of them makes it fit.
        certain: it would not fit without the allowances either.
    """

    what: str
    change: str
    certain: bool


def misfit(options: Options, family: Family, config: Config, gpu: float) -> Misfit | None:
    """Why a trainer rank does not fit `gpu` GiB, and what to change; None if it fits."""
    terms = fullest_rank(options, family, config)
    if terms.total <= gpu * GIB:
        return None
    taken = f"{terms.total / GIB:.0f} of {gpu:g} GiB in {terms.fullest}"
    lessened = ("weights", "gradients", "optimizer", "activations", "one layer", "logits", "weight update")  # by a flag
    what = f"a trainer rank takes {taken}; {max(lessened, key=lambda name: terms.gpu[name])} weigh most"
    return Misfit(what, cheapest(options, family, config, gpu), terms.total - terms.allowed > gpu * GIB)


def cheapest(options: Options, family: Family, config: Config, gpu: float) -> str:
    """The flags of the first change that makes a trainer rank fit: one alone, else as many as it takes."""

    def fits(changed: Options) -> bool:
        return _divides(changed, family, config) and fullest_rank(changed, family, config).total <= gpu * GIB

    for change in CHANGES:
        for flags, changed in change(options):
            if fits(changed):
                return flags
    given: list[str] = []
    for change in CHANGES:
        for flags, changed in change(options):
            if _divides(changed, family, config):
                options = changed
                given.append(flags)
                if fits(options):
                    return " ".join(given)
                break
    return ""


def _divides(options: Options, family: Family, config: Config) -> bool:
    """Whether the layout divides ranks and model."""
    fields = family.transformer(config)
    tp, pp, ep = (getattr(options, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert"))
    try:
        planned(options)
    except UsageError:
        return False
    experts = fields.get("num_moe_experts") or 1
    even = pp == 1 or fields["num_layers"] % pp == 0 or any("pipeline_stage" in name for name in options.megatron)
    return (
        even and fields["num_attention_heads"] % tp == 0 and fields["num_query_groups"] % tp == 0 and experts % ep == 0
    )


# ---- changes


def with_megatron(options: Options, **fields: Any) -> Options:
    """The options with other settings of Megatron's."""
    return options.model_copy(update={"megatron": {**options.megatron, **fields}})


def _chunks(options: Options) -> Iterator[Change]:
    if options.log_probs_chunk_size <= 0:
        yield "--log-probs-chunk-size 1024", options.model_copy(update={"log_probs_chunk_size": 1024})


def _bucket(options: Options) -> Iterator[Change]:
    size = 128 * 2**20
    if options.update_weight_buffer_size > size:
        yield f"--update-weight-buffer-size {size}", options.model_copy(update={"update_weight_buffer_size": size})


def _recompute(options: Options) -> Iterator[Change]:
    if options.megatron.get("recompute_granularity") != "full":
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield flags, with_megatron(options, **RECOMPUTE)


def _spread(options: Options) -> Iterator[Change]:
    if not options.megatron.get("use_distributed_optimizer", True):
        yield "--use-distributed-optimizer", with_megatron(options, use_distributed_optimizer=True)


def _fewer_tokens(options: Options) -> Iterator[Change]:
    alone = -(-longest_sample(options) // options.context_parallel_size)
    tokens = tokens_per_gpu(options)
    while options.use_dynamic_batch_size and options.max_tokens_per_gpu and tokens > alone:
        tokens = max(alone, tokens // 2)
        yield f"--max-tokens-per-gpu {tokens}", options.model_copy(update={"max_tokens_per_gpu": tokens})


def _precise(options: Options) -> Iterator[Change]:
    if options.bf16 and not options.megatron.get("use_precision_aware_optimizer"):
        flags = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
        told = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
        yield flags, with_megatron(options, **told)


def _doubled(kind: str) -> Callable[[Options], Iterator[Change]]:
    def change(options: Options) -> Iterator[Change]:
        name = f"{kind}_size"
        size = getattr(options, name)
        if kind == "expert_model_parallel" and size == 1:
            return
        while (size := 2 * size) <= options.world_size:
            update: dict[str, Any] = {name: size}
            if kind == "tensor_model_parallel":
                update["sequence_parallel"] = True
            more = " --sequence-parallel" if "sequence_parallel" in update and not options.sequence_parallel else ""
            yield f"--{name.replace('_', '-')} {size}{more}", options.model_copy(update=update)

    return change


def _offload(options: Options) -> Iterator[Change]:
    if not options.megatron.get("optimizer_cpu_offload"):
        told = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
        yield "--optimizer-cpu-offload --use-precision-aware-optimizer", with_megatron(options, **told)


#: from the cheapest to the dearest
CHANGES: tuple[Callable[[Options], Iterator[Change]], ...] = (
    _chunks,
    _bucket,
    _spread,
    _recompute,
    _fewer_tokens,
    _doubled("context_parallel"),
    _doubled("expert_model_parallel"),
    _doubled("tensor_model_parallel"),
    _doubled("pipeline_model_parallel"),
    _offload,
    _precise,
)
