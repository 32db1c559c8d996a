"""Every name that a flag or a key of a recipe may have, where it leads, and what may have been meant by one that leads
nowhere: another trainer's word, or a slip of the fingers.

Invariants: a name that leads nowhere is an error; hpcrl's own names come before Megatron's, so no setting can be
reached in two places.  A hint names only what exists, and none is given where nothing is similar enough: a wrong one
costs more than none.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo

from hpcrl.config import passthrough
from hpcrl.config.options import SECTIONS, Options
from hpcrl.config.passthrough import Target, dashed
from hpcrl.config.value_types import Kind, kind_of
from hpcrl.errors import UsageError, raise_together

_BOUNDS = {
    annotated_types.Ge: ("ge", ">="),
    annotated_types.Gt: ("gt", ">"),
    annotated_types.Le: ("le", "<="),
    annotated_types.Lt: ("lt", "<"),
}


def kind_of_field(field: FieldInfo) -> Kind:
    """The kind of one of hpcrl's own options, with its bounds."""
    bounds = [
        (sign, getattr(m, attr)) for m in field.metadata for cls, (attr, sign) in _BOUNDS.items() if isinstance(m, cls)
    ]
    return replace(kind_of(field.annotation), bounds=" and ".join(f"{sign} {value:g}" for sign, value in bounds))


def sections() -> Iterator[tuple[str, list[str]]]:
    """(title, option names) of every section, in the order of options.py; together they hold every option once."""
    shown: set[str] = set()
    for section in SECTIONS:
        names = list(section.__annotations__)
        shown |= {*names}
        yield section.__doc__ or section.__name__, names
    yield "name, and what passes through", [name for name in Options.model_fields if name not in shown]


@cache
def own() -> dict[str, Target]:
    """hpcrl's own flags, without the leading dashes: --x for every option, and --no-x for a switch."""
    found: dict[str, Target] = {}
    for name in (name for _, names in sections() for name in names):
        kind = kind_of_field(Options.model_fields[name])
        flag = dashed(name)
        switch = kind.base == "bool"
        found[flag] = Target("", name, kind, True if switch else None)
        if switch:
            found[f"no-{flag}"] = Target("", name, kind, False)
    return found


def _foreign(*tables: passthrough.Table) -> list[str]:
    """Flags of these packages that may be given: those that an error may propose."""
    return [
        flag
        for table in tables
        for flag, to in passthrough.spellings(table).items()
        if to.field not in passthrough.OWNED[table]
    ]


def find_flag(flag: str, extra: Iterable[str] = (), stage: str = "") -> Target:
    """Where `--flag` leads, or `--STAGE.flag`.

    Raises:
        UsageError: says what may have been meant: one of all known flags (and of `extra`, the command's own).
    """
    dashes = f"--{stage}." if stage else "--"
    if target := own().get(flag):
        return target
    table: passthrough.Table = "vllm" if flag.startswith("vllm-") else "megatron"
    mine = [*own(), *extra]
    if (_taken_for_ours(flag, table, mine) is False) and (
        target := passthrough.find_setting(table, flag, f"{dashes}{flag}")
    ):
        return target
    raise UsageError(
        f"{dashes}{flag} is an unknown option",
        advice(flag, [*mine, *_foreign("megatron", "vllm")], lambda name: f"{dashes}{name}"),
    )


def find_key(key: str, where: str, extra: Iterable[str] = ()) -> Target:
    """Where a key at the top of a recipe, or of a stage, leads; keys are spelled with underscores.

    Raises:
        UsageError: names the place `where` and what may have been meant.
    """
    flag = dashed(key)
    keys = {f: t for f, t in own().items() if t.fixed is not False}  # off is `x = false`, not another name
    if flag in keys and "-" not in key:
        return keys[flag]
    mine = [*keys, *extra]
    if "-" not in key and flag not in own():
        table: passthrough.Table = "vllm" if flag.startswith("vllm-") else "megatron"
        if not _taken_for_ours(flag, table, mine) and (
            target := passthrough.find_setting(table, flag, f"{where}: {key}")
        ):
            return target
    unknown = f"{where}: {key} is an unknown option"
    if flag in own() and "-" not in key:
        raise UsageError(unknown, f"write {key.removeprefix('no_')} = false")
    raise UsageError(unknown, advice(flag, [*mine, *_foreign("megatron", "vllm")], _as_key))


def find_in(table: passthrough.Table, key: str, where: str) -> Target:
    """Where a key inside [megatron] or [vllm] leads: a field's name, or Megatron's flag spelled with underscores."""
    shown = f"{where}: {key}"
    flag = ("vllm-" if table == "vllm" else "") + dashed(key)
    if table == "megatron" and (mine := own().get(flag)):
        raise UsageError(f"{shown} is an option of hpcrl's own", f"write {mine.field} outside the table")
    if "-" not in key and (target := passthrough.find_setting(table, flag, shown)):
        return target
    hint = advice(flag, _foreign(table), lambda name: _as_key(name.removeprefix("vllm-")))
    raise UsageError(f"{shown} is an unknown option", hint)


def _as_key(flag: str) -> str:
    return flag.replace("-", "_")


#: names of Megatron's whose words are all in a name of ours, so that they would be taken for slips of it
ALSO_MEGATRON = ("num-layers", "q-lora-rank", "kv-lora-rank")


def _taken_for_ours(flag: str, table: passthrough.Table, mine: Collection[str]) -> bool:
    """Whether an unknown name must be a slip, although the package is not installed here that could tell."""
    return (
        table == "megatron"
        and passthrough.settings(table) is None
        and flag not in ALSO_MEGATRON
        and bool(nearest(flag, mine) or elsewhere(flag, mine))
    )


def settle_value(target: Target, value: Any, shown: str) -> Any:
    """The value to store for `target` when a file says `value`.

    Raises:
        UsageError: if it is of another type.
    """
    if not target.kind.fits(value):
        raise UsageError(f"{shown} = {spell(value)}: expected {target.kind}")
    if not target.table or target.fixed is None:
        return value
    if value is False and not isinstance(target.fixed, bool):
        raise UsageError(f"{shown} = false: expected true", "leave it out")
    return target.fixed if value else not target.fixed


def spell(value: Any) -> str:
    """A value as a person writes it in a recipe (an object as JSON)."""
    return json.dumps(value, default=str, ensure_ascii=False)


def gather(values: Mapping[str, Any], where: str, extra: Iterable[str] = ()) -> dict[str, Any]:
    """Keys and values of a file -> own options by name, and the tables "megatron" and "vllm" by field; all checked.

    Bounds, and what options say together, are left to `recipe.resolve_stages`.

    Raises:
        UsageError: all that is wrong with them.
    """
    found: dict[str, Any] = {}
    wrong: list[UsageError] = []
    for key, value in values.items():
        try:
            if key not in ("megatron", "vllm"):
                put(found, find_key(key, where, extra), value, f"{where}: {key}")
            elif isinstance(value, dict):
                found.setdefault(key, {}).update(gather_table(key, value, f"{where}: [{key}]"))
            else:
                raise UsageError(f"{where}: {key} = {spell(value)}: expected a table")
        except UsageError as error:
            wrong.append(error)
    raise_together(wrong)
    return found


def gather_table(table: passthrough.Table, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys and values of [megatron] or [vllm] -> values by field, checked; values by field come back as they are."""
    found: dict[str, Any] = {table: {}}
    wrong: list[UsageError] = []
    for key, value in values.items():
        try:
            put(found, find_in(table, key, where), value, f"{where} {key}")
        except UsageError as error:
            wrong.append(error)
    raise_together(wrong)
    return found[table]


def put(found: dict[str, Any], target: Target, value: Any, shown: str) -> None:
    """Store a file's value where it belongs."""
    place = found.setdefault(target.table, {}) if target.table else found
    place[target.field] = settle_value(target, value, shown)


# ---- unknown names

#: what to write here -> what TRL, verl, OpenRLHF, Hugging Face's Trainer and others call it
_HERE: dict[str, str] = {
    "{lr}": "learning-rate actor-lr actor-learning-rate",
    "{rollout-batch-size} (prompts of one rollout) or {global-batch-size} (samples of one optimizer "
    "step)": "batch-size train-batch-size generation-batch-size",
    "{global-batch-size} (samples of one optimizer "
    "step)": "mini-batch-size ppo-mini-batch-size gradient-accumulation-steps grad-accum",
    "{num-steps-per-rollout}": "steps-per-generation",
    "{micro-batch-size}, or {use-dynamic-batch-size} with "
    "{max-tokens-per-gpu}": "per-device-train-batch-size micro-train-batch-size "
    "ppo-micro-batch-size ppo-micro-batch-size-per-gpu",
    "{use-dynamic-batch-size}": "use-dynamic-bsz packing",
    "{max-tokens-per-gpu}": "ppo-max-token-len-per-gpu max-token-len-per-gpu",
    "{hf-checkpoint}": "model model-name model-name-or-path model-path pretrain pretrained actor-model-path tokenizer "
    "tokenizer-path tokenizer-model tokenizer-name-or-path",
    "{ref-load}": "ref-model ref-model-path reference-model",
    "{prompt-data}": "dataset dataset-name dataset-path data train-data train-file train-files data-path data-files",
    "{eval-prompt-data}": "eval-dataset eval-data eval-file val-data val-file val-files test-data test-files",
    "{input-key}": "prompt-key prompt-column input-column",
    "{label-key}": "answer-key target-key label-column answer-column response-key",
    "{num-epoch}": "epochs num-epochs num-train-epochs total-epochs max-epochs num-episodes",
    "{num-rollout}": "max-steps num-steps total-steps total-training-steps training-steps iterations",
    "{n-samples-per-prompt}": "num-generations group-size num-samples num-return-sequences rollout-n "
    "samples-per-prompt",
    "{n-samples-per-eval-prompt}": "eval-n-samples num-eval-generations",
    "{rollout-max-response-len}": "max-completion-length max-new-tokens max-response-length max-tokens "
    "generate-max-len",
    "{rollout-max-prompt-len}": "max-prompt-length prompt-max-len max-prompt-len",
    "{rollout-max-context-len}": "max-length max-len max-seq-len max-seq-length max-model-len context-length",
    "{rollout-temperature}": "temperature sampling-temperature",
    "{eval-temperature}": "eval-sampling-temperature",
    "{rollout-top-p}": "top-p",
    "{rollout-top-k}": "top-k",
    "{rollout-min-p}": "min-p",
    "{rollout-skip-special-tokens}": "skip-special-tokens",
    "{rollout-stop}": "stop stop-strings stop-words",
    "{rm-type} or "
    "{custom-rm-path}": "reward reward-fn reward-func reward-funcs reward-function reward-model reward-manager "
    "reward-model-path custom-reward-function",
    "{advantage-estimator}": "adv-estimator algorithm algo",
    "{advantage-estimator} gspo": "importance-sampling-level",
    "{disable-grpo-std-normalization}": "scale-rewards norm-adv-by-std-in-grpo",
    "{advantage-estimator} module.function": "custom-advantage-function-path",
    "{normalize-advantages}": "whiten-advantages whiten-rewards advantage-whitening adv-norm",
    "{lambd}": "lam gae-lambda",
    "{value-clip}": "cliprange-value value-clip-range",
    "{overlong-buffer-len}": "overlong-buffer soft-overlong-buffer",
    "{overlong-penalty-factor}": "penalty-factor",
    "{overlong-prompts}": "truncation filter-overlong-prompts",
    "{rollout-sample-filter-path}, a function that takes them out": "mask-truncated-completions",
    "{custom-generate-function-path}": "tools environment-factory",
    "{loss-type}": "loss objective",
    "{pg-loss-type}": "policy-loss policy-loss-type loss-mode",
    "{calculate-per-token-loss} or {pg-loss-divisor}": "loss-agg-mode loss-reduction",
    "{eps-clip}": "epsilon clip-ratio clip-range cliprange clip-eps clip-ratio-low",
    "{eps-clip-high}": "epsilon-high clip-ratio-high",
    "{eps-clip-c}": "clip-ratio-c dual-clip delta",
    "{entropy-coef}": "entropy-coeff entropy-coefficient entropy-bonus ent-coef",
    "{use-kl-loss} with {kl-loss-coef}": "beta kl-beta kl-coeff kl-loss-coeff",
    "{kl-coef}": "init-kl-coef use-kl-in-reward kl-penalty kl-ctrl kl-in-reward",
    "{kl-loss-type}": "kl-estimator kl-penalty-type",
    "{use-opsm} with {opsm-delta}": "off-policy-mask-threshold",
    "{use-unbiased-kl}": "use-bias-correction-kl",
    "{ref-update-weight}": "ref-model-mixup-alpha",
    "{ref-update-interval}": "ref-model-sync-steps sync-ref-model",
    "{use-tis}": "importance-sampling-correction vllm-importance-sampling-correction",
    "{tis-clip}": "tis-imp-ratio-cap vllm-importance-sampling-cap",
    "{clip-grad}": "max-grad-norm grad-clip gradient-clipping max-norm",
    "{lr-decay-style}": "lr-scheduler lr-scheduler-type scheduler",
    "{lr-warmup-iters}": "warmup-steps lr-warmup-steps num-warmup-steps warmup-iters warmup",
    "{lr-warmup-fraction}": "warmup-ratio lr-warmup-ratio lr-warmup-steps-ratio",
    "{optimizer}": "optim",
    "{adam-eps}": "adam-epsilon",
    "{adam-beta1} and {adam-beta2}": "betas adam-betas",
    "{run-dir}": "output-dir output out-dir default-local-dir experiment-dir work-dir",
    "{save}": "save-path save-dir ckpt-dir ckpt-path checkpoint-dir",
    "{save-interval}": "save-steps save-freq save-every checkpoint-interval",
    "{save-keep-last}": "save-total-limit max-ckpt-num max-ckpts-to-keep",
    "{eval-interval}": "eval-steps eval-freq test-freq eval-every val-interval",
    "{skip-eval-before-train}": "val-before-train",
    "{rollout-shuffle}": "shuffle shuffle-data",
    "{actor-num-nodes}": "num-nodes nnodes nodes actor-nodes",
    "{actor-num-gpus-per-node}": "num-gpus gpus gpus-per-node num-gpus-per-node n-gpus-per-node nproc-per-node "
    "actor-gpus",
    "{rollout-num-gpus}": "num-engines vllm-num-engines rollout-gpus",
    "{tensor-model-parallel-size}": "tp tp-size tensor-parallel tensor-parallel-size",
    "{pipeline-model-parallel-size}": "pp pp-size pipeline-parallel pipeline-parallel-size",
    "{context-parallel-size}": "cp cp-size ulysses-sequence-parallel-size ring-attn-size",
    "{expert-model-parallel-size}": "ep ep-size expert-parallel-size",
    "{rollout-num-gpus-per-engine}": "rollout-tp rollout-tensor-parallel-size",
    "{vllm-gpu-memory-utilization}": "gpu-memory-utilization mem-fraction-static vllm-mem-fraction "
    "sglang-mem-fraction-static",
    "{vllm-enforce-eager}": "enforce-eager",
    "{colocate}": "hybrid-engine",
    "{lora-rank}": "lora lora-r use-lora use-peft peft-config",
    "{target-modules}": "lora-target-modules",
    "{exclude-modules}": "lora-exclude-modules",
    "{use-rslora}": "lora-use-rslora",
    "{lora-adapter-path}": "lora-adapter peft-path",
    "{offload-rollout}": "free-cache-engine",
    "{vllm-max-num-seqs}": "max-num-seqs sglang-max-running-requests",
    "{recompute-granularity}": "gradient-checkpointing activation-checkpointing enable-gradient-checkpointing "
    "recompute",
    "{loop}": "train-loop async-mode async-training async-train use-async fully-async",
    "{max-staleness}": "staleness-threshold max-head-offpolicyness max-off-policy-steps async-level max-async-level",
    "{update-weights-interval}": "sync-interval weight-sync-interval trigger-parameter-sync-step vllm-sync-interval",
    "{deterministic-mode}": "deterministic full-determinism",
}
#: why there is nothing to write -> the names
_NOWHERE: dict[str, str] = {
    "metrics are in the run directory: metrics.jsonl, and tensorboard/ for "
    "TensorBoard": "wandb use-wandb wandb-project wandb-group wandb-key wandb-team wandb-mode wandb-host wandb-dir "
    "wandb-run-name wandb-run-id wandb-random-suffix report-to logger logging-dir logging-steps "
    "log-interval use-tensorboard tensorboard-dir tb-dir swanlab use-swanlab mlflow trackio",
    "a penalty changes the distribution that is sampled from, and the trainer computes it "
    "without": "repetition-penalty presence-penalty frequency-penalty rollout-repetition-penalty",
    "engine and trainer are always compared, there is nothing to switch on": "get-mismatch-metrics",
    "advantages are computed where a loss has them: there is nothing to switch "
    "off": "disable-compute-advantages-and-returns",
    "there is no such way to fill a batch yet": "over-sampling-filter-input-size",
    "the weights under an adapter are in bf16 or fp32": "qlora",
    "Megatron-core trains; ranks are laid out by --tensor-model-parallel-size and its "
    "like": "fsdp fsdp-config deepspeed zero-stage train-backend accelerator",
    "masks follow the chat template itself, for every model": "loss-mask-type",
    "a sample is trained on once; --num-steps-per-rollout takes several optimizer steps of a rollout, each of other "
    "samples": "num-iterations ppo-epochs num-ppo-epochs",
    "the engines always are vLLM's": "use-vllm vllm-mode rollout-backend rollout-engine inference-engine",
    "weights are in bf16 or fp32": "load-in-4bit load-in-8bit mixed-precision precision",
    "every sample is kept, and shown by: hpcrl samples RUN": "log-completions num-completions-to-print",
    "a run resumes with: hpcrl resume RUN": "resume-from-checkpoint resume-from resume-mode resume-path auto-resume",
    "roles differ by separate options, such as --critic-load and --critic-lr": "megatron-config-path",
    "changes go from memory to memory, no file is written; --weight-transfer disk writes files, and calls "
    "--custom-update-weight-post-write-path": "custom-delta-pre-push-path",
    "what a step trained on is kept by --save-token-data, its samples by "
    "--save-debug-rollout-data": "save-debug-train-data load-debug-rollout-data-subsample",
    "one process of one job: nothing is started through Ray": "ray-address ray-num-nodes use-ray",
}
_SGLANG = "the engines are vLLM's: its own settings are written --vllm-..."
#: settings of packages that need not be installed here
_FOREIGN = ("vllm-", "recompute-", "optimizer")
_WORDS = {name: text for text, names in reversed(_HERE.items()) for name in names.split()}
_REASONS = {name: text for text, names in _NOWHERE.items() for name in names.split()}

CLOSE = 0.9  #: how similar two names must be (`difflib.ratio`) where they do not consist of the same words
ALIKE = 0.8  #: the same where every word of the one is in the other
WORD = 0.65  #: and those words themselves


def advice(flag: str, known: Collection[str], spell: Callable[[str], str]) -> str:
    """What to do about the unknown name `flag`.

    Args:
        flag, known: names as flags have them, without dashes in front.
        spell: how a name is written where the user wrote it.
    """
    if hint := elsewhere(flag, known, spell):
        return hint
    found = nearest(flag, known)
    return f"did you mean {spell(found)}?" if found else "see hpcrl run --help"


def elsewhere(flag: str, known: Collection[str], spell: Callable[[str], str] = str) -> str:
    """What this name of other trainers is here, or why it is nothing; "" for a name that is not known from anywhere."""
    name = flag.replace("_", "-")
    text = _WORDS.get(name, "")
    if text and all(option in known or option.startswith(_FOREIGN) for option in re.findall(r"{(.+?)}", text)):
        return "write " + re.sub(r"{(.+?)}", lambda match: spell(match[1]), text)
    return _REASONS.get(name) or (_SGLANG if name.startswith("sglang-") else "")


def nearest(flag: str, known: Iterable[str]) -> str | None:
    """The known name that `flag` is a slip of, or None: the same words, some of them misspelt or left out, or almost
    the same letters."""
    name, names = flag.replace("_", "-").strip("-"), list(known)
    if name in names:
        return name
    for found in difflib.get_close_matches(name, names, n=5, cutoff=ALIKE):
        if difflib.SequenceMatcher(None, name, found).ratio() >= CLOSE or _same_words(name, found):
            return found
    return None


def _same_words(name: str, found: str) -> bool:
    return all(difflib.get_close_matches(word, found.split("-"), n=1, cutoff=WORD) for word in name.split("-"))
