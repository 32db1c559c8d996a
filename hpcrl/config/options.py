"""Every option, declared once: its flag, TOML key, type, default, help line and row of docs/options.md come from here.

Invariant: an option that exists here has an effect.  Names and meanings are slime's or Megatron's where one exists
(`source` says which).  Settings of Megatron's and vLLM's own dataclasses are not repeated here: they arrive in
`megatron` and `vllm`, checked against the installed packages by `setting_names.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from os.path import normpath
from typing import Any

from hpcrl.config.sections import Base, opt
from hpcrl.config.sections.algorithm import (
    AdapterOptions,
    AlgorithmOptions,
    DistillationOptions,
    FurtherTokenOptions,
    OffPolicyOptions,
    OptimizerOptions,
)
from hpcrl.config.sections.data import DataOptions, EvalOptions, RewardOptions
from hpcrl.config.sections.layout import BatchOptions, ClusterOptions, ModelOptions
from hpcrl.config.sections.run import InspectOptions, RunOptions, TrackerOptions, WeightOptions
from hpcrl.config.sections.sampling import AgentOptions, PluginOptions, RolloutOptions
from hpcrl.config.sections.sandboxes import SandboxOptions

OWN_LAYERS = "mtp"  #: the method that drafts with the layers which a checkpoint has behind the model's last one
_DRAFTS_OF_TEXT = ("ngram", "[ngram]", "ngram_gpu", "suffix")  #: methods of vLLM that draft without a model


def drafts_with_weights(setting: Mapping[str, Any]) -> bool:
    """Whether this value of --vllm-speculative-config drafts by a model: without "method", vLLM reads "model" as one of
    its methods if it has that name."""
    return bool(setting) and (setting.get("method") or setting.get("model")) not in _DRAFTS_OF_TEXT


def drafts_with_own_layers(setting: Mapping[str, Any], checkpoint: str | None) -> bool:
    """Whether this value of --vllm-speculative-config drafts with the layers which `checkpoint`, the model's, has
    behind its last one; "model" may name that checkpoint too."""
    model = setting.get("model")
    same = model is None or (checkpoint is not None and normpath(str(model)) == normpath(checkpoint))
    return setting.get("method") == OWN_LAYERS and same


class Options(
    RunOptions,
    ClusterOptions,
    ModelOptions,
    DataOptions,
    RolloutOptions,
    AgentOptions,
    SandboxOptions,
    RewardOptions,
    EvalOptions,
    AlgorithmOptions,
    OffPolicyOptions,
    DistillationOptions,
    FurtherTokenOptions,
    AdapterOptions,
    BatchOptions,
    OptimizerOptions,
    WeightOptions,
    InspectOptions,
    TrackerOptions,
    PluginOptions,
):
    """All options of one run, checked and frozen."""

    name: str = opt("run", "name of the run")
    megatron: dict[str, Any] = opt(
        {}, "fields of Megatron's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig"
    )
    vllm: dict[str, Any] = opt({}, "fields of vLLM's engine arguments (flags: --vllm-X)")

    def __getattr__(self, name: str) -> Any:
        """A setting of the user's own, for custom functions."""
        custom = self.__dict__.get("custom")
        if custom and name in custom:
            return custom[name]
        return super().__getattr__(name)  # type: ignore[misc]  (pydantic's, which says what is missing)

    @property
    def world_size(self) -> int:
        """Trainer ranks."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def drafts_with_weights(self) -> bool:
        """Whether the engines' speculative drafts come from a model, whose weights an engine must keep."""
        return drafts_with_weights(self.vllm.get("speculative_config") or {})

    @property
    def refreshes_drafts(self) -> bool:
        """Whether weight updates bring the layers that engines draft with, which the trainer then has too."""
        setting = self.vllm.get("speculative_config") or {}
        return bool(self.mtp_num_layers) and drafts_with_own_layers(setting, self.hf_checkpoint)

    @property
    def data_parallel_size(self) -> int:
        """DP = world size / (TP x PP x CP); 1 where nothing is trained: one process takes what is sampled."""
        if self.debug_rollout_only:
            return 1
        return self.world_size // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def micro_batch_multiple(self) -> int:
        """What divides the micro-batches of a rank in one optimizer step: Megatron's groups where there are virtual
        stages."""
        stages = self.num_layers_per_virtual_pipeline_stage or self.num_virtual_stages_per_pipeline_rank
        if not stages and not self.megatron.get("pipeline_model_parallel_layout"):
            return 1
        return self.megatron.get("microbatch_group_size_per_vp_stage") or self.pipeline_model_parallel_size

    @property
    def trained_heads(self) -> int:
        """Layers that predict further tokens and are trained."""
        return (self.mtp_num_layers or 0) if self.enable_mtp_training else 0

    @property
    def expert_tensor_size(self) -> int:
        """ETP: --expert-tensor-parallel-size; Megatron's default is TP."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def learns_labels(self) -> bool:
        """Whether the responses come from the prompt file: supervised fine-tuning, and preferences that are written
        there."""
        return self.loss_type == "sft_loss" or (self.loss_type == "dpo_loss" and self.rejected_key is not None)

    @property
    def needs_engines(self) -> bool:
        """Whether anything is sampled: learning what the prompt file holds, without evaluation, asks no engine."""
        return not self.trains_only and (not self.learns_labels or self.eval_interval is not None)

    @property
    def trains_only(self) -> bool:
        """Whether the run has no engines: it trains from files, or an option turns them off."""
        return self.debug_train_only or self.load_debug_rollout_data is not None

    @property
    def trainer_slots(self) -> int:
        """Slots of all trainer ranks; none where nothing is trained."""
        return 0 if self.debug_rollout_only else self.world_size

    @property
    def grades(self) -> bool:
        """Whether a reward is given; without one the rewards of what is sampled are 0."""
        return bool(self.rm_type or self.custom_rm_path)

    @property
    def only_evaluates(self) -> bool:
        """Whether nothing is trained, so that no training prompts are needed."""
        return self.num_rollout == 0

    @property
    def num_engines(self) -> int:
        """Engines: --rollout-num-gpus over the GPUs of one; none where nothing is sampled."""
        return self.engine_gpus // self.rollout_num_gpus_per_engine if self.needs_engines else 0

    @property
    def own_sandbox_hosts(self) -> int:
        """Hosts that have sandboxes and nothing else."""
        return (self.sandbox_num_nodes or 1) if self.sandbox_on == "nodes" and self.needs_engines else 0

    @property
    def engine_gpus(self) -> int:
        """GPUs of all engines: --rollout-num-gpus, or with --colocate the trainer's."""
        if self.rollout_num_gpus is not None:
            return self.rollout_num_gpus
        return self.world_size if self.colocate else 0

    @property
    def sampling_gpus(self) -> int:
        """GPUs of the engines that this run starts; 0 where others sample for it too, whose GPUs are not known."""
        return 0 if self.rollout_external_engine_addrs else self.num_engines * self.rollout_num_gpus_per_engine

    @property
    def engine_data_parallel_size(self) -> int:
        """Into how many parts an engine divides its requests: --vllm-data-parallel-size."""
        return int(self.vllm.get("data_parallel_size") or 1)

    @property
    def engine_tensor_parallel_size(self) -> int:
        """GPUs over which an engine divides its matrices."""
        return self.rollout_num_gpus_per_engine // self.engine_data_parallel_size

    @property
    def takes_turns(self) -> bool:
        """Whether trainer and engines take turns on the same GPUs."""
        return self.colocate and self.num_engines > 0 and not self.debug_rollout_only

    @property
    def gpu_transfer(self) -> str:
        """What carries weights where the engines have GPUs, a value of --weight-transfer: stock vLLM's way where rank 0
        gathers within a node."""
        if self.weight_transfer != "auto":
            return self.weight_transfer
        return "vllm" if self.actor_num_nodes == 1 else "ipc" if self.colocate else "nccl"

    @property
    def offloads_train(self) -> bool:
        """Whether the trainer's state leaves the GPUs while the engines sample."""
        return self.takes_turns and self.offload_train is not False

    @property
    def rollout_timeout(self) -> float:
        """Seconds that the samples of one step, or an evaluation, may take."""
        return 3600.0 * self.timeout_factor

    @property
    def custom_generate_timeout(self) -> float:
        """Seconds of wall-clock time that one call of a custom generator may take outside of the engines."""
        return 300.0 * self.timeout_factor

    @property
    def engine_restarts(self) -> int:
        """How often in an attempt an engine that has died or hangs is started again."""
        return self.attempts - 1

    @property
    def sleep_level(self) -> int:
        """vLLM's level of sleep while the trainer trains; 0: nothing is sampled, and everything stays in memory."""
        if not self.takes_turns or self.offload_rollout is False:
            return 0
        kept = self.vllm.get("enable_eplb") or self.drafts_with_weights
        kept = kept or (self.lora_rank and self.lora_serve != "merged")  # no update would bring the weights again
        return 1 if kept else 2

    @property
    def truncated_sampling(self) -> bool:
        """Whether rollouts are sampled from some of the tokens only."""
        return self.rollout_top_p < 1 or self.rollout_top_k > 0

    @property
    def samples_per_rollout(self) -> int:
        """Samples of one rollout: prompts x responses."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def runs_ahead(self) -> bool:
        """Whether anything is sampled while something else is trained on."""
        return self.loop != "sync" and not (self.learns_labels or self.trains_only or self.debug_rollout_only)

    @property
    def loop_lag(self) -> int:
        """Policy versions by which the trainer is ahead of what the engines sampled one rollout ahead, at most."""
        return 0 if self.loop == "sync" else self.update_weights_interval * self.steps_per_rollout

    @property
    def staleness_limit(self) -> int:
        """Policy versions that fully-async issues groups ahead for."""
        return 2 * self.loop_lag if self.max_staleness is None else self.max_staleness

    @property
    def staleness_bound(self) -> int | None:
        """Policy versions that a trained token may lag behind; None: any."""
        if self.loop == "fully-async":
            return self.staleness_limit
        if self.partial_rollout:
            return self.max_staleness
        return self.loop_lag if self.loop == "sync" or self.max_staleness is None else self.max_staleness

    @property
    def never_waits(self) -> bool:
        """Whether groups are in flight all the time."""
        return self.runs_ahead and self.loop == "fully-async"

    @property
    def leaves_groups_over(self) -> bool:
        """Whether more groups may be issued than a batch takes."""
        more = self.over_sampling_batch_size is not None and self.over_sampling_batch_size > self.rollout_batch_size
        return more or self.dynamic_sampling_filter_path is not None

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of one rollout."""
        return self.num_steps_per_rollout or self.samples_per_rollout // (
            self.global_batch_size or self.samples_per_rollout
        )

    @property
    def step_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.samples_per_rollout // self.steps_per_rollout


#: the groups of options, in the order of the help text
SECTIONS: tuple[type[Base], ...] = Options.__bases__
