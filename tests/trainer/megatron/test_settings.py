"""Megatron's flags on the way to its configuration: what they become, what is refused before anything is built, and
why."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.config.rules.option_rules import check_options
from hpcrl.errors import UsageError
from hpcrl.trainer.megatron.capabilities import GRADIENTS, INTERLEAVED, PERMUTE, ROPE, ROUTER
from tests.support.published_models import MODELS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
LAYERS = 6
MODEL: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 128,
    "gated_linear_unit": True,
    "activation_func": "silu",
}

#: a command line -> what it becomes: fields of TransformerConfig, OptimizerConfig or DistributedDataParallelConfig
TAKEN: dict[str, dict[str, Any]] = {
    "": {
        "overlap_p2p_comm": False,
        "batch_p2p_comm": True,
        "virtual_pipeline_model_parallel_size": None,
        "grad_reduce_in_fp32": True,
    },
    "--accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32": {
        "grad_reduce_in_fp32": True,
        "attention_softmax_in_fp32": True,
    },
    "--grad-reduce-in-bf16": {"grad_reduce_in_fp32": False},
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "--recompute-activations": {"recompute_granularity": "selective"},
    "--attention-dropout 0.0 --hidden-dropout 0.0": {"attention_dropout": 0.0},
    "--no-rope-fusion --no-bias-swiglu-fusion --no-masked-softmax-fusion": {
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
    },
    "--overlap-grad-reduce --ddp-bucket-size 1000": {"overlap_grad_reduce": True, "bucket_size": 1000},
    "--optimizer sgd --no-use-distributed-optimizer": {"optimizer": "sgd"},
    "--attention-backend auto --transformer-impl local": {"transformer_impl": "local"},
    "--pipeline-model-parallel-size 2": {"deallocate_pipeline_outputs": True, "variable_seq_lengths": True},
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1": {
        "deallocate_pipeline_outputs": False,  # gloo may not have sent them yet
        "virtual_pipeline_model_parallel_size": 3,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    },
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3": {
        "virtual_pipeline_model_parallel_size": None
    },
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --decoder-last-pipeline-num-layers 2": {
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers_in_last_pipeline_stage": 2,
    },
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt|t|ttL": {
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
    },
}
CUDA = "cannot be done without CUDA"
LEGACY = "--moe-use-legacy-grouped-gemm"  # which the later of the two releases of Megatron-core has no more
#: a command line -> a part of the error
REFUSED: dict[str, str] = {
    "--optimizer-cpu-offload": f"--optimizer-cpu-offload {CUDA}",
    "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer": CUDA,
    "--overlap-cpu-optimizer-d2h-h2d": "has no effect without --optimizer-cpu-offload",
    "--use-precision-aware-optimizer": f"{CUDA} and Transformer Engine",
    "--attention-backend flash": f"--attention-backend flash {CUDA}",
    "--use-flash-attn": f"--attention-backend flash {CUDA}",
    "--attention-backend local": "takes no packed sequences",
    "--no-attention-softmax-in-fp32": f"attention-softmax-in-fp32 {CUDA}",
    "--transformer-impl transformer_engine": CUDA,
    "--moe-grouped-gemm": f"{CUDA} and Transformer Engine",
    LEGACY: "no family has names for the weights of that layer",
    "--moe-permute-fusion": CUDA,
    "--moe-enable-deepep": f"{CUDA} and DeepEP",
    "--moe-token-dispatcher-type flex": CUDA,
    "--gradient-accumulation-fusion": CUDA,
    "--recompute-method uniform": "has no effect without --recompute-granularity full",
    "--recompute-granularity full": "recompute",
    "--recompute-granularity selective --recompute-modules layernorm": CUDA,
    "--recompute-granularity selective --recompute-modules moe_act": "moe_grouped_gemm",
    "--cross-entropy-loss-fusion": "the loss is computed by hpcrl",
    "--overlap-param-gather": "right after each step",
    "--cuda-graph-impl local": "differ in length",
    "--optimizer muon": "adam or sgd",
    "--optimizer sgd": "--no-use-distributed-optimizer",
    "--exp-avg-dtype bf16": "precision-aware",
    "--hidden-dropout 0.1": "hpcrl needs 0.0",
    "--overlap-p2p-comm": "virtual pipeline stages",
    "--microbatch-group-size-per-virtual-pipeline-stage 4": "has no effect without "
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3 "
    "--no-overlap-p2p-communication": "reach the wrong stage",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|ttttt|L": "--pipeline-model-parallel-layout",
}
try:
    parse_flags([LEGACY])
except UsageError:
    del REFUSED[LEGACY]
#: a command line that is refused by its words alone -> a part of the error
REFUSED_AT_ONCE: dict[str, str] = {
    "--batch-p2p-comm": "--overlap-p2p-comm",
    "--virtual-pipeline-model-parallel-size 2": "use --num-virtual-stages-per-pipeline-rank",
    "--lr-warmup-samples 10": "use --lr-warmup-iters",
    "--use-torch-fsdp2": "DistributedDataParallel",
    "--train-iters 10": "use --num-rollout",
    "--lr-decay-style wsd": "expected",
}


def read(line: str, **more: Any) -> Options:
    return Options(**parse_flags(line.split())[0] | more)


def resolved_on_rank(every: list[Options]) -> list[dict[str, Any] | str]:
    """For each of the options the fields of Megatron's dataclasses, or the error."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from hpcrl.trainer.megatron.settings import construct
    from hpcrl.trainer.megatron.settings import resolve_settings as settings_of

    found: list[dict[str, Any] | str] = []
    for options in every:
        try:
            settings = settings_of(options, dict(MODEL), {})
            classes = (DistributedDataParallelConfig, settings.ddp), (OptimizerConfig, settings.optimizer)
            made = [construct(cls, values) for cls, values in (*classes, (TransformerConfig, settings.transformer))]
            values = {name: value for config in made for name, value in vars(config).items()}
            found.append(
                {name: value for name, value in values.items() if isinstance(value, (str, int, float, type(None)))}
            )
        except UsageError as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def resolved() -> dict[str, dict[str, Any] | str]:
    lines = [*TAKEN, *REFUSED]
    return dict(zip(lines, run_ranks(1, resolved_on_rank, [read(line) for line in lines])[0], strict=True))


@pytest.mark.parametrize("line", TAKEN)
def test_a_flag_reaches_megatrons_configuration(resolved: dict[str, Any], line: str) -> None:
    found = resolved[line]
    assert isinstance(found, dict), found
    assert {name: found[name] for name in TAKEN[line]} == TAKEN[line]


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_have_its_effect_is_refused(resolved: dict[str, Any], line: str) -> None:
    assert isinstance(resolved[line], str), "it was taken"
    assert REFUSED[line] in resolved[line] and "\n" not in resolved[line]


@pytest.mark.parametrize("line", REFUSED_AT_ONCE)
def test_what_needs_no_megatron_to_be_refused(line: str) -> None:
    with pytest.raises(UsageError, match=REFUSED_AT_ONCE[line]):
        read(line)


# ---- machines that this one is not

#: a recipe of examples/ -> its model, and some of what its settings become where all that they need is there
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-4b-8gpu": ("Qwen3-4B", {"recompute_method": "uniform", "sequence_parallel": True, "num_layers": 36}),
    "glm-z1-9b-8gpu": ("GLM-4-9B-0414", {"context_parallel_size": 2, "num_layers": 40, "apply_rope_fusion": True}),
    "glm-4.5-355b-64gpu": (
        "GLM-4.5",
        {
            "num_layers": 92,
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": None,
            "expert_model_parallel_size": 16,
            "expert_tensor_parallel_size": 1,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "use_precision_aware_optimizer": True,
            "moe_token_dispatcher_type": "flex",
            "moe_enable_deepep": True,
            "moe_grouped_gemm": True,
            "moe_router_num_groups": None,
            "apply_rope_fusion": True,
            "moe_permute_fusion": True,
            "moe_router_fusion": False,  # the model has a correction bias
            "gradient_accumulation_fusion": False,  # Megatron's own layers', which is Apex's
        },
    ),
}
KERNELS = frozenset({ROPE, INTERLEAVED, PERMUTE, ROUTER, GRADIENTS})
#: packages beside CUDA, a command line -> a part of the error, or "" if it is taken
ELSEWHERE: dict[tuple[str, str], str] = {
    ("", "--moe-grouped-gemm"): "--moe-grouped-gemm needs Transformer Engine, which is not installed here",
    ("grouped_gemm", "--moe-grouped-gemm"): "--moe-grouped-gemm needs Transformer Engine",
    ("transformer_engine", "--moe-grouped-gemm"): "",
    ("transformer_engine", "--moe-grouped-gemm --transformer-impl local"): "which --transformer-impl local leaves out",
    ("grouped_gemm", LEGACY): "no family has names",
    ("", "--optimizer-cpu-offload"): "could not load its checkpoints; give both",
    ("transformer_engine", "--optimizer-cpu-offload --use-precision-aware-optimizer"): "",
    ("", "--attention-backend flash"): "flash-attn or Transformer Engine, which is not installed",
    ("flash_attn", "--attention-backend flash"): "",
    ("", "--gradient-accumulation-fusion"): "needs Transformer Engine or Apex, which is not installed here",
    ("transformer_engine", "--gradient-accumulation-fusion"): "",
    ("apex", "--gradient-accumulation-fusion"): "",
    ("transformer_engine", "--tp-comm-overlap"): "hpcrl does not set up Transformer Engine's user buffers",
    ("transformer_engine", "--tp-comm-bootstrap-backend gloo"): "has no effect without --tp-comm-overlap",
    ("transformer_engine", "--moe-token-dispatcher-type flex"): "needs DeepEP",
    (
        "",
        "--pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
    ): "",
}
if LEGACY not in REFUSED:
    del ELSEWHERE["grouped_gemm", LEGACY]
#: packages beside CUDA, a command line -> whether all experts of a layer share a GEMM
GROUPED = {
    ("", ""): False,
    ("transformer_engine", ""): True,
    ("transformer_engine", "--no-moe-grouped-gemm"): False,
    ("transformer_engine", "--transformer-impl local"): False,
}


def on_other_machines(every: list[tuple[Options, str, set[str]]]) -> list[dict[str, Any] | str]:
    """For (options, published model or "", packages beside CUDA) all settings by name, or the error."""
    from hpcrl.models.family import find_family
    from hpcrl.trainer.megatron.capabilities import Machine
    from hpcrl.trainer.megatron.settings import resolve_settings as settings_of

    found: list[dict[str, Any] | str] = []
    for options, name, packages in every:
        model, gpt = dict(MODEL), {}
        if name:
            config = MODELS[name][1]
            family = find_family(config, name)
            model = family.transformer(config)
            gpt = {**family.gpt(config), **family.facts}
        try:
            found_kernels = KERNELS if "transformer_engine" in packages else KERNELS & {GRADIENTS}
            if "apex" not in packages:
                found_kernels -= {GRADIENTS}
            settings = settings_of(options, model, gpt, Machine(True, frozenset(packages), found_kernels))
            values = {**settings.ddp, **settings.optimizer, **settings.transformer}
            found.append(
                {name: value for name, value in values.items() if isinstance(value, (str, int, float, type(None)))}
            )
        except UsageError as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def elsewhere() -> dict[Any, dict[str, Any] | str]:
    """What EXAMPLES and ELSEWHERE come to."""
    asked: dict[Any, tuple[Options, str, set[str]]] = {
        key: (read(key[1]), "", set(key[0].split())) for key in (*ELSEWHERE, *GROUPED)
    }
    for name, (model, _) in EXAMPLES.items():
        recipe = load_recipe(ROOT / "examples" / f"{name}.toml")
        options = resolve_stages(recipe, {}, {"run": "/run", "prepared": "/run/prepared"})[0]
        asked[name] = (options, model, {"transformer_engine", "deep_ep"})
    return dict(zip(asked, run_ranks(1, on_other_machines, list(asked.values()))[0], strict=True))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_setting_of_the_examples_has_its_place(elsewhere: dict[Any, Any], name: str) -> None:
    found, wanted = elsewhere[name], EXAMPLES[name][1]
    assert isinstance(found, dict), found
    assert {key: found.get(key) for key in wanted} == wanted
    assert found["transformer_impl"] == "transformer_engine"


@pytest.mark.parametrize("key", ELSEWHERE)
def test_cuda_settings_follow_packages(elsewhere: dict[Any, Any], key: tuple[str, str]) -> None:
    """What a machine with CUDA uses depends on what is installed."""
    if not ELSEWHERE[key]:
        assert isinstance(elsewhere[key], dict), elsewhere[key]
    else:
        assert isinstance(elsewhere[key], str), "it was taken"
        assert ELSEWHERE[key] in elsewhere[key]


def test_grouped_experts(elsewhere: dict[Any, Any]) -> None:
    """Experts are grouped where Transformer Engine does it."""
    grouped = {key: found["moe_grouped_gemm"] for key, found in elsewhere.items() if key in GROUPED}
    assert grouped == GROUPED


# ---- what options say together


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("--num-virtual-stages-per-pipeline-rank 2", "needs a pipeline"),
        ("--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1", "both cut the pipeline"),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 12",
            "the 6.*one optimizer step must.*4",
        ),
        ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", "exclude each other"),
        ("--lr-warmup-iters 2 --lr-warmup-init 1", "is higher than --lr"),
        ("--lr-decay-style WSD", "give --lr-wsd-decay-iters"),
        ("--lr-wsd-decay-iters 3", "--lr-decay-style is not WSD"),
        ("--weight-decay-incr-style linear", "give --start-weight-decay and --end-weight-decay"),
        (
            "--weight-decay-incr-style linear --start-weight-decay 1 --end-weight-decay 0.1",
            "--start-weight-decay 1 is higher than --end-weight-decay 0.1",
        ),
        (
            "--pipeline-model-parallel-size 4 --context-parallel-size 2 --no-balance-data",
            "one data-parallel rank",
        ),
    ],
)
def test_contradictions(line: str, error: str) -> None:
    needed = {
        "hf_checkpoint": "m",
        "prompt_data": "p",
        "num_rollout": 3,
        "label_key": "l",
        "rm_type": "math",
        "rollout_num_gpus": 1,
    }
    batch = {"rollout_batch_size": 6, "n_samples_per_prompt": 4, "actor_num_gpus_per_node": 8}
    with pytest.raises(UsageError, match=error):
        check_options(read(line, **needed, **batch))


# ---- schedules


def rates_on_rank(every: list[Options], steps: int) -> list[list[tuple[float, float]] | str]:
    """(learning rate, weight decay) of each step."""
    from hpcrl.trainer.megatron.model import make_scheduler

    group: dict[str, Any] = {"default_config": True, "params": []}
    optimizer = SimpleNamespace(param_groups=[group])
    found: list[list[tuple[float, float]] | str] = []
    for options in every:
        try:
            scheduler = make_scheduler(optimizer, options)
        except UsageError as error:
            found.append(str(error))
            continue
        found.append([])
        for _ in range(steps):
            found[-1].append((group["lr"], group["weight_decay"]))
            scheduler.step(1)
    return found


def rates_when_known(
    options: Options, rollouts: int, steps: int
) -> tuple[list[tuple[float, float]], dict[str, Any], str]:
    """(rates of each step, its state half-way, the error for a run of one rollout) of a schedule whose length comes
    later."""
    from hpcrl.trainer.megatron.model import know_length, make_scheduler

    group: dict[str, Any] = {"default_config": True, "params": []}
    optimizer = SimpleNamespace(param_groups=[group])
    with pytest.raises(UsageError) as error:
        know_length(make_scheduler(optimizer, options), options, 1)
    scheduler = make_scheduler(optimizer, options)
    know_length(scheduler, options, rollouts)
    found = []
    for step in range(steps):
        found.append((group["lr"], group["weight_decay"]))
        scheduler.step(1)
        if step == steps // 2:
            half = dict(scheduler.state_dict())
    resumed = make_scheduler(optimizer, options)
    resumed.load_state_dict(half)
    know_length(resumed, options, 3 * rollouts)  # it goes on as it began
    return found, {name: half[name] == value for name, value in resumed.state_dict().items()}, str(error.value)


def test_a_schedule_learns_how_long_the_epochs_are() -> None:
    """As Megatron's of slime: --num-epoch becomes rollouts when the prompts are counted, and the schedule takes all of
    them."""
    schedule = "--lr 1 --min-lr 0.1 --lr-decay-style cosine --weight-decay-incr-style linear --start-weight-decay 0.1"
    schedule += " --end-weight-decay 0.5 --lr-warmup-iters 2"
    [known] = run_ranks(1, rates_on_rank, [read(f"{schedule} --num-rollout 10")], 10)[0]
    found, same, error = run_ranks(1, rates_when_known, read(f"{schedule} --num-epoch 2"), 10, 10)[0]
    assert [*map(sum, found)] == pytest.approx([*map(sum, known)]) and found[1][0] < found[2][0] > found[9][0]
    assert all(same.values())
    assert "--lr-warmup-iters 2 is not less than" in error and "1 optimizer steps" in error


def test_learning_rates_and_weight_decays() -> None:
    """Each schedule against its formula: warm-up to step w, the end at step n."""
    peak = 1.0
    low = 0.1
    w = 4
    n = 20
    tail = 8
    base = f"--lr {peak} --min-lr {low} --num-rollout {n}"
    warm = f"{base} --lr-warmup-iters {w}"

    def late(step: int) -> float:
        return (step - w) / (n - w)

    def wsd(step: int) -> float:
        return max(0.0, (step - (n - tail)) / tail)

    formulas: dict[str, Any] = {
        f"{warm} --lr-decay-style linear": lambda s: low + (peak - low) * (1 - late(s)),
        f"{warm} --lr-decay-style cosine": lambda s: low + (peak - low) * (1 + math.cos(math.pi * late(s))) / 2,
        f"{warm} --lr-decay-style inverse-square-root": lambda s: max(low, peak * math.sqrt(w / s)),
        f"{warm} --lr-decay-style WSD --lr-wsd-decay-iters {tail}": lambda s: (
            low + (peak - low) * (2 * 0.5 ** wsd(s) - 1)
        ),
        f"{warm} --lr-decay-style WSD --lr-wsd-decay-iters {tail} --lr-wsd-decay-style linear": lambda s: (
            low + (peak - low) * (1 - wsd(s))
        ),
        f"{base} --lr-warmup-fraction 0.2 --lr-decay-style linear": lambda s: low + (peak - low) * (1 - late(s)),
    }
    growing = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.5"
    high = f"--lr {peak} --min-lr 2 --lr-decay-style constant --num-rollout {n}"  # for a stage beside this one
    lines = [*formulas, f"{warm} --lr-warmup-init 0.5 {growing}", high]
    lines.append(f"{warm} --lr-decay-style linear --lr-decay-iters 10 {growing}")
    *found, grown, flat, longer = run_ranks(1, rates_on_rank, [read(line) for line in lines], n)[0]
    for (line, formula), rates in zip(formulas.items(), found, strict=True):
        for step, (rate, decay) in enumerate(rates):
            assert rate == pytest.approx(peak * step / w if step <= w else formula(step)), (line, step)
            assert decay == 0.0
    for step, (rate, decay) in enumerate(grown):
        assert rate == pytest.approx(min(peak, 0.5 + 0.5 * step / w))
        assert decay == pytest.approx(0.1 + 0.4 * step / n)
    assert flat == [(peak, 0.0)] * n
    for step, (rate, decay) in enumerate(longer):
        assert rate == pytest.approx(
            peak * step / w if step <= w else max(low, low + (peak - low) * (1 - (step - w) / (10 - w)))
        )
        assert decay == pytest.approx(0.1 + 0.4 * step / n), (
            "weight decay grows over the run, not over --lr-decay-iters"
        )


def test_a_refusal_comes_before_the_model(tmp_path: Path) -> None:
    """It needs no more than config.json, and no memory: of these sizes no weight could be made."""
    sizes = {
        "vocab_size": 10**9,
        "hidden_size": 2**20,
        "intermediate_size": 2**20,
        "num_hidden_layers": 2,
        "head_dim": 64,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    more = {
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads | more))
    opts = read("--optimizer-cpu-offload", hf_checkpoint=str(tmp_path), bf16=False, actor_num_gpus_per_node=1)
    assert CUDA in run_ranks(1, build_on_rank, opts)[0]


def build_on_rank(opts: Options) -> str:
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.megatron import model

    try:
        model.build(opts, parallel_state.initialize(opts))
    except UsageError as error:
        return str(error)
    return "it was built"
