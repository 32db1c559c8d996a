"""The trained model: Megatron's GPTModel under its DDP wrapper, with optimizer and schedule.

    policy = build(options, ranks)
    load_hf(policy, directory)          # or checkpoint.load: a built model holds no weights yet
    logits = policy.model(ids, positions, None, packed_seq_params=packed)   # [1, t, vocabulary / TP] on the last stage

Invariant: all of the architecture comes from config.json of --hf-checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from hpcrl.errors import UsageError
from hpcrl.models.family import Config, Family, find, read_config
from hpcrl.options import Options
from hpcrl.trainer.attention import block_spec
from hpcrl.trainer.hf import export, load_hf
from hpcrl.trainer.megatron import Ranks, check_layout
from hpcrl.trainer.optimizer import make_optimizer, make_scheduler
from hpcrl.trainer.settings import Settings, construct, resolve

__all__ = ["Policy", "build", "export", "load_hf"]


@dataclass(frozen=True)
class Policy:
    """model: DDP around (for bf16) Float16Module around GPTModel; config: its TransformerConfig.

    hf_config: config.json.  optimizer and scheduler: Megatron's; the schedule counts optimizer steps.
    """

    model: DistributedDataParallel
    config: TransformerConfig
    family: Family
    hf_config: Config
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    ranks: Ranks

    @property
    def module(self) -> GPTModel:
        """The GPTModel inside the wrappers."""
        inner: Any = self.model
        while not isinstance(inner, GPTModel):
            inner = inner.module
        return inner

    @property
    def vocab_size(self) -> int:
        """Real tokens; rows of the output layer past it are padding and must be kept out of every softmax."""
        return self.hf_config["vocab_size"]


def build(options: Options, ranks: Ranks) -> Policy:
    """The model of --hf-checkpoint's config.json, without weights, on this rank's device; collective.

    The config says calculate_per_token_loss: a loss function returns (sum, count, report) of its micro-batch, Megatron
    sums gradients over micro-batches, DP and CP and divides them by the sum of all counts, whatever is counted.
    UsageError if the layout does not divide the model or a Megatron setting does not fit; DataError for a bad config.json.
    """
    if options.hf_checkpoint is None:
        raise UsageError("--hf-checkpoint is not given", "name a Hugging Face model directory")
    hf_config = read_config(options.hf_checkpoint)
    family = find(hf_config, options.hf_checkpoint)
    fields, gpt = family.transformer(hf_config), family.gpt(hf_config)
    settings = resolve(options, fields, {**gpt, "vocab_size": hf_config["vocab_size"]})
    check_layout(options, settings.transformer)
    config = construct(TransformerConfig, settings.transformer)
    module: Any = GPTModel(
        config,
        block_spec(config, family.adapt),
        vocab_size=padded_vocab_size(hf_config["vocab_size"], ranks.tp_size),
        max_sequence_length=hf_config.get("max_position_embeddings", 2**20),
        pre_process=ranks.first_stage,
        post_process=ranks.last_stage,
        parallel_output=True,
        **gpt,
    ).to(ranks.device)
    if options.bf16:
        module = Float16Module(config, module)
    return _wrap(module, config, family, hf_config, settings, options, ranks)


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding: the next multiple of TP, and no more (padding rows would take part in a careless softmax)."""
    return -(-vocab_size // tp_size) * tp_size


def _wrap(
    module: Any, config: TransformerConfig, family: Family, hf_config: Config, settings: Settings, options: Options, ranks: Ranks
) -> Policy:
    """DDP, optimizer, schedule, and the hooks by which Megatron's schedules find them."""
    model = DistributedDataParallel(config, construct(DistributedDataParallelConfig, settings.ddp), module)
    optimizer = make_optimizer(model, settings.optimizer)
    scheduler = make_scheduler(optimizer, options)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync
    return Policy(model, config, family, hf_config, optimizer, scheduler, ranks)
