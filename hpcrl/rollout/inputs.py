"""What the rollout role reads before a run begins: prompts, held-out sets, tokenizer, rewards, custom functions.

Invariant: whatever is wrong with one of them shows here, before any engine is waited for.
"""

from __future__ import annotations

from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_points
from hpcrl.errors import UsageError
from hpcrl.rollout.custom_hooks import RolloutHooks
from hpcrl.rollout.evaluation.evaluator import HeldOut, read_held_out
from hpcrl.rollout.grading.service import Grading
from hpcrl.rollout.prompts.custom_source import CustomSource
from hpcrl.rollout.prompts.prompt_files import PromptFile, read_training
from hpcrl.rollout.prompts.prompt_source import PromptSource, count_rollouts
from hpcrl.rollout.prompts.tokenizer import load_tokenizer
from hpcrl.rollout.samplers.custom import CustomSampler
from hpcrl.rollout.saved_rollouts import SavedRollouts
from hpcrl.run.role import RoleContext


class RolloutInputs:
    """Everything that is read before the run begins.  DataError and UsageError say what is wrong with it."""

    def __init__(self, context: RoleContext) -> None:
        options = context.options
        self.samples = not options.learns_labels
        self.hooks = RolloutHooks(options, load_points(options, "rollout"))
        self.tokenizer = load_tokenizer(options.hf_checkpoint)
        self.held_out: list[HeldOut] = []
        self.grading: Grading | None = None
        self.custom: CustomSampler | None = None  # makes samples with the user's function
        self.file: PromptFile | None = None
        if options.load_debug_rollout_data is not None:
            self.source: PromptSource | CustomSource | SavedRollouts = SavedRollouts(options)
            self.total, self.said = self.source.total, str(self.source)
            return
        if self.samples and not context.plan.engine_count:
            raise UsageError(
                f"--loss-type {options.loss_type} needs engines, the plan has none", "give --rollout-num-gpus"
            )
        evaluates = options.eval_interval is not None and bool(context.plan.engine_count)
        if evaluates:
            self.held_out = read_held_out(options, self.tokenizer)
        self._open_source(options)
        self.said = "; ".join(
            [
                *(str(file) for file in (self.file, *(h.file for h in self.held_out)) if len(file)),
                f"{self.total} rollouts",
            ]
        )
        graded = [self.file] if self.samples and options.grades and self.total else []
        graded += [held.file for held in self.held_out]
        more = [word for held in self.held_out for word in held.eval_set.rewards]
        if graded and (options.grades or more or not options.custom_generate_function_path):
            self.grading = Grading(options, graded, more, self.hooks)
        if options.custom_generate_function_path and (self.samples or self.held_out):
            self.custom = CustomSampler(options, self.tokenizer, self.grading)

    def _open_source(self, options: Options) -> None:
        """Where the prompts come from, and how many rollouts they make."""
        if (made := self.hooks.only("data_source_path")) is not None and not options.only_evaluates:
            own = CustomSource(options, self.tokenizer, made)
            self.source = own
            self.file = own.file()
            if (length := own.length()) is None and options.num_rollout is None:
                raise UsageError(
                    f"--num-epoch: --data-source-path {options.data_source_path} does not say how many prompts an "
                    "epoch has",
                    "give --num-rollout, or the class a __len__",
                )
            self.total = count_rollouts(options, length or 0, f"--data-source-path {options.data_source_path}")
            return
        self.file = read_training(options, self.tokenizer)
        self.total = count_rollouts(options, len(self.file))
        self.source = PromptSource(self.file, options.rollout_seed, options.rollout_shuffle)
