"""How long a step takes, by role, before anything runs: from the operations and bytes that it moves, and what a GPU is
rated for.

    for line in speed_lines(estimate(options, family, config, "h100-sxm", memory, response), update_seconds): ...

A trainer is bound by matrix products, an engine that samples by reading weights and keys and values from its memory,
once for each token of all requests that run together.

Invariants: operations are those of `hpcrl.speed.flops`, which a run's `perf/mfu` counts with too; whatever is assumed
and not computed is a constant here, and is printed with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hpcrl.adapters.settings import lora_settings
from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.config.rules.several_adapters import policies_of
from hpcrl.memory.activations import tokens_per_gpu
from hpcrl.memory.engine import engine_terms, gpu_weights, token_bytes
from hpcrl.memory.parameters import Layout, whole_model
from hpcrl.memory.training import GIB
from hpcrl.models.family import Config, Family
from hpcrl.speed.cards import named
from hpcrl.speed.flops import ModelFlops, model_flops, pairs

DENSE = 0.40  #: of the rated operations, that training reaches while it computes: recomputed ones count, bubbles do not
EXPERTS = 0.25  #: the same of models with experts, whose products are small and whose tokens travel
READ = 0.60  #: of the rated bandwidth, that decoding reaches
PROMPT = 256  #: tokens of a prompt in the mean, where no shorter limit is given
SHORTER = 0.5  #: the mean response, as a share of the longest


@dataclass(frozen=True)
class RoleSpeed:
    """One role in one step.

    Attributes:
        tokens: that it works through.
        mfu: operations that the mathematics needs, by the rated ones of its GPUs in that time.
    """

    seconds: float
    tokens: float
    mfu: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Estimate:
    """A step of a run.

    Attributes:
        card: its name in `cards`.
        trainer, engines: None where there is none.
        at_once: responses that run together on one engine.
        ahead: the engines sample the next rollout while the trainer trains on this one.
        prompt, response: tokens in the mean.
        reached: the share of the rated operations that was assumed.
    """

    card: str
    trainer: RoleSpeed | None
    engines: RoleSpeed | None
    at_once: int
    ahead: bool
    prompt: int
    response: int
    reached: float

    def step(self, update: float) -> float:
        """Seconds of a step, with a weight update that takes so long."""
        parts = [role.seconds for role in (self.trainer, self.engines) if role]
        return (max(parts) if self.ahead else sum(parts)) + update


class RolloutWork(NamedTuple):
    """What engines make: samples of prompts, each of so many tokens in the mean."""

    prompts: int
    samples: int
    prompt: int
    response: int


def estimate(
    options: Options, family: Family, config: Config, card: str, memory: float, response: int | None = None
) -> Estimate:
    """The speed of a step; of several adapters, of the one that has the most tokens to sample.

    Args:
        memory: GiB of a GPU.
        response: its mean length in tokens; None: a share of the longest.

    Raises:
        UsageError: for a card whose rates are not known.
    """
    own = max(policies_of(options), key=_sampled)
    prompt = min(PROMPT, own.rollout_max_prompt_len or PROMPT)
    mean = response or max(1, int(SHORTER * own.rollout_max_response_len))
    reached = EXPERTS if whole_model(family, config).expert else DENSE
    trainer = None if options.debug_rollout_only else _training(own, family, config, card, prompt, mean, reached)
    engines, at_once = None, 0
    if options.num_engines:
        work = RolloutWork(own.rollout_batch_size, _samples(own), prompt, mean)
        engines, at_once = _sampling(options, family, config, card, memory, work, reached)
    ahead = options.runs_ahead or len(options.adapter) > 1  # they sample for another adapter
    return Estimate(card, trainer, engines, at_once, ahead, prompt, mean, reached)


def _samples(options: Options) -> int:
    """Of a rollout."""
    return options.rollout_batch_size * options.n_samples_per_prompt


def _sampled(options: Options) -> int:
    """Tokens of a rollout's responses, at most."""
    return _samples(options) * options.rollout_max_response_len


def _training(
    options: Options, family: Family, config: Config, card: str, prompt: int, response: int, reached: float
) -> RoleSpeed:
    """All passes over a rollout, with the pipeline's bubble."""
    model = model_flops(family, config, lora=lora_settings(options))
    layout = Layout.of(options, family.transformer(config)["num_layers"])
    samples = _samples(options)
    work = samples * (prompt + response), samples * pairs([prompt + response]), samples * response
    wanted = needs(options)
    passes = wanted.reference + wanted.old_logprobs + wanted.teacher_model + wanted.critic
    # only an optimizer step goes through layers that predict further tokens
    trained = model_flops(family, config, options.trained_heads, lora_settings(options))
    needed = passes * model.forward(*work) + trained.training(*work) + wanted.critic * model.training(*work)
    again = options.megatron.get("recompute_granularity") == "full"
    computed = needed + again * (1 + wanted.critic) * model.forward(work[0], work[1], 0)
    rated = named(card).tflops * 1e12 * options.world_size
    each = work[0] * layout.cp / layout.copies / options.steps_per_rollout  # tokens of a data-parallel rank and step
    micro_batches = max(1.0, each / (tokens_per_gpu(options) * layout.cp))
    bubble = 1 + (layout.pp - 1) / (layout.virtual_stages * micro_batches)
    seconds = bubble * computed / (reached * rated)
    return RoleSpeed(seconds, work[0], needed / (seconds * rated))


def _sampling(
    options: Options,
    family: Family,
    config: Config,
    card: str,
    memory: float,
    work: RolloutWork,
    reached: float,
) -> tuple[RoleSpeed, int]:
    """A rollout on all engines, and the responses that run together on one of them."""
    prompts, samples, prompt, response = work
    model = model_flops(family, config)
    rates = named(card)
    gpus = options.rollout_num_gpus_per_engine
    held = engine_terms(options, family, config, memory * GIB).cached_tokens
    each = samples / options.num_engines
    at_once = max(1, int(min(math.ceil(each), held // (prompt + response), options.rollout_server_concurrency)))
    context = prompt + response / 2  # of a response that is half done
    read = _read(options, family, config, at_once)
    read += at_once / options.engine_data_parallel_size * context * token_bytes(options, family, config)
    token = _token(model, context)
    one = max(
        read / (READ * rates.bandwidth * 1e9), at_once * token / gpus / (reached * rates.tflops * 1e12)
    )  # one token of each
    read_in = prompts / options.num_engines * model.forward(prompt, pairs([prompt]), 0)
    rated = rates.tflops * 1e12 * gpus
    seconds = max(1.0, each / at_once) * response * one + read_in / (reached * rated)
    needed = each * response * token + read_in
    return RoleSpeed(seconds, samples * response, needed / (seconds * rated)), at_once


def _token(model: ModelFlops, context: float) -> float:
    return model.forward(1, context, 1)


def _read(options: Options, family: Family, config: Config, at_once: int) -> float:
    """Bytes of the weights that a GPU reads for one token of each request: of experts those that any of them chose."""
    weights = gpu_weights(options, family, config)
    fields = family.transformer(config)
    count = whole_model(family, config)
    if not count.expert:
        return weights
    chosen = 1 - (1 - fields["moe_router_topk"] / fields["num_moe_experts"]) ** at_once
    dense = (count.dense / options.engine_tensor_parallel_size) / (
        count.dense / options.engine_tensor_parallel_size + count.expert / options.rollout_num_gpus_per_engine
    )
    return weights * (dense + (1 - dense) * chosen)


def speed_lines(found: Estimate, update: float) -> Iterator[str]:
    """The estimate as lines to read.

    Args:
        update: seconds of a weight update.
    """
    card = named(found.card)
    yield (
        f"speed (estimated; docs/memory.md), of {found.card}: {card.tflops:g} TFLOP/s in BF16, {card.bandwidth:g} GB/s "
        f"({card.source})"
    )
    for name, role in (("trainer", found.trainer), ("engines", found.engines)):
        if role:
            more = f"; {found.at_once} responses at once on each" if name == "engines" else ""
            yield f"  {name}: {role.seconds:.0f} s a step, {role.rate:,.0f} tokens/s, MFU {role.mfu:.2f}{more}"
    how = "the longer of both, and the update" if found.ahead else "one after the other"
    yield f"  step: {found.step(update):.0f} s, {how}"
    yield (
        f"  assumes responses of {found.response} tokens in the mean (--mean-response-length), prompts of "
        f"{found.prompt}, {found.reached:.0%} of the rated operations and {READ:.0%} of the rated bandwidth; rewards, "
        "saves, evaluation and a few responses much longer than the mean come on top"
    )
