"""Flags and recipes -> options: every name, every type, the order of precedence, and what fits together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.config import passthrough
from hpcrl.config.eval_sets import eval_sets
from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, Stage, changed, load_recipe, resolve_stages
from hpcrl.config.rules.data import label_key
from hpcrl.config.rules.option_rules import check_options, inert
from hpcrl.config.setting_names import kind_of_field
from hpcrl.errors import UsageError
from tests.support.options import GRPO, PLACES, SFT


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def write(path: Path, values: dict[str, Any], more: str = "") -> Path:
    """A recipe file of `values`, then the text `more`."""
    file = path / "recipe.toml"
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items()) + more)
    return file


def recipe(values: dict[str, Any], *stages: Stage) -> Recipe:
    return Recipe("r", Path("/recipes/r.toml"), values, (), stages or (Stage("", {}),))


def example(name: str) -> Any:
    """A value that differs from the default of an option."""
    kind, value = (
        kind_of_field(Options.model_fields[name]),
        Options.model_fields[name].get_default(call_default_factory=True),
    )
    if kind.choices:
        return [kind.choices[-1]] if kind.many else kind.choices[-1]
    one = {
        "bool": not value,
        "int": 4096,
        "float": 0.5
        if "beta" in name
        or "fraction" in name
        or "failed" in name
        or name.endswith("_p")
        or name in ("gamma", "lambd", "lora_dropout")
        else 1.5,
        "str": "some text",
        "object": {},
    }[kind.base]
    return [one, one] if kind.many else one


# ---- every option


def test_every_option_is_a_flag_and_a_key(tmp_path: Path) -> None:
    for name in Options.model_fields.keys() - {"megatron", "vllm"}:
        is_a_flag_and_a_key(name, tmp_path)


def is_a_flag_and_a_key(name: str, tmp_path: Path) -> None:
    value, flag = example(name), "--" + name.replace("_", "-")
    if name == "train_env_vars":
        value = {"A": "b c"}
    if isinstance(value, bool):
        words = [flag if value else f"--no-{flag[2:]}"]
    elif isinstance(value, dict):
        words = [flag, json.dumps(value)]
    else:
        words = [flag, *map(str, value if isinstance(value, list) else [value])]
    overrides, _, rest = parse_flags(words)
    assert (overrides, rest) == ({name: value}, []), name
    assert getattr(Options.model_validate(overrides, strict=True), name) == value, name
    read = load_recipe(write(tmp_path, {name: value}))
    assert read.name == value if name == "name" else read.values == {name: value}, name


@given(
    st.dictionaries(
        st.sampled_from(["lr", "seed", "rollout_batch_size"]), st.lists(st.booleans(), min_size=3, max_size=3)
    )
)
def test_precedence_flag_stage_recipe(given: dict[str, list[bool]]) -> None:
    """A flag overrides the stage, and the stage the recipe."""
    layers: list[dict[str, Any]] = [{k: n for k, where in given.items() if where[n - 1]} for n in (1, 2, 3)]
    one = recipe(GRPO | layers[0], Stage("s", layers[1]))
    options = resolve_stages(one, layers[2], PLACES)[0]
    for name in ("lr", "seed", "rollout_batch_size"):
        wanted = next((layer[name] for layer in reversed(layers) if name in layer), Options.model_fields[name].default)
        assert getattr(options, name) == wanted


def test_tables_are_merged_field_by_field() -> None:
    top = {"vllm": {"max_num_seqs": 1, "enforce_eager": True}, "megatron": {"optimizer": "adam"}}
    one = recipe(GRPO | top, Stage("s", {"vllm": {"max_num_seqs": 2, "block_size": 16}}))
    options = resolve_stages(one, {"vllm": {"block_size": 32}}, PLACES)[0]
    assert options.vllm == {"max_num_seqs": 2, "enforce_eager": True, "block_size": 32}
    assert options.megatron == {"optimizer": "adam"}


def test_the_command_line_is_read_word_by_word() -> None:
    argv = "r.toml --lr=3e-4 --rollout-stop a b --resume R --no-bf16 --lr 2 --eval-prompt-data h --seed -1 last --dry-run".split()
    extra = {
        "resume": kind_of_field(Options.model_fields["run_dir"]),
        "dry-run": kind_of_field(Options.model_fields["bf16"]),
    }
    overrides, command, rest = parse_flags(argv, extra)
    assert overrides == {"lr": 2.0, "rollout_stop": ["a", "b"], "bf16": False, "eval_prompt_data": ["h"], "seed": -1}
    assert command == {"resume": "R", "dry-run": True}
    assert rest == ["r.toml", "last"]


# ---- Megatron's and vLLM's own


@pytest.mark.parametrize(
    ("words", "table", "field", "value"),
    [
        ("--recompute-granularity full", "megatron", "recompute_granularity", "full"),
        ("--recompute-modules core_attn mlp", "megatron", "recompute_modules", ["core_attn", "mlp"]),
        ("--attention-dropout 0", "megatron", "attention_dropout", 0.0),
        ("--attention-softmax-in-fp32", "megatron", "attention_softmax_in_fp32", True),
        ("--no-attention-softmax-in-fp32", "megatron", "attention_softmax_in_fp32", False),
        ("--attention-backend flash", "megatron", "attention_backend", "flash"),
        ("--accumulate-allreduce-grads-in-fp32", "megatron", "grad_reduce_in_fp32", True),
        ("--no-check-for-nan-in-loss-and-grad", "megatron", "check_for_nan_in_grad", False),
        ("--no-rope-fusion", "megatron", "apply_rope_fusion", False),
        ("--no-masked-softmax-fusion", "megatron", "masked_softmax_fusion", False),
        ("--decoder-last-pipeline-num-layers 3", "megatron", "num_layers_in_last_pipeline_stage", 3),
        ("--disable-tp-comm-bulk-dgrad", "megatron", "tp_comm_bulk_dgrad", False),
        ("--no-barrier-with-level-1-timing", "megatron", "barrier_with_L1_time", False),
        ("--fp8-format hybrid", "megatron", "fp8", "hybrid"),
        ("--use-distributed-optimizer", "megatron", "use_distributed_optimizer", True),
        ("--optimizer-cpu-offload", "megatron", "optimizer_cpu_offload", True),
        ("--exp-avg-dtype bf16", "megatron", "exp_avg_dtype", "bf16"),
        ("--num-layers 4", "megatron", "num_layers", 4),
        ("--norm-epsilon 1e-6", "megatron", "layernorm_epsilon", 1e-6),
        ("--disable-bias-linear", "megatron", "add_bias_linear", False),
        ("--swiglu", "megatron", "gated_linear_unit", True),
        ("--num-experts 8", "megatron", "num_moe_experts", 8),
        ("--moe-layer-freq [0]*1+[1]*45", "megatron", "moe_layer_freq", "[0]*1+[1]*45"),
        ("--use-rope-scaling", "megatron", "rope_scaling", True),
        ("--group-query-attention", "megatron", "group_query_attention", True),
        ("--untie-embeddings-and-output-weights", "megatron", "share_embeddings_and_output_weights", False),
        ("--rotary-base 1000000", "megatron", "rotary_base", 1e6),
        ("--vllm-max-num-seqs 64", "vllm", "max_num_seqs", 64),
        ("--vllm-gpu-memory-utilization 0.7", "vllm", "gpu_memory_utilization", 0.7),
        ("--vllm-enforce-eager", "vllm", "enforce_eager", True),
        ("--vllm-no-enable-prefix-caching", "vllm", "enable_prefix_caching", False),
        ("--vllm-cudagraph-capture-sizes 1 2 4", "vllm", "cudagraph_capture_sizes", [1, 2, 4]),
        ("--vllm-kv-cache-dtype fp8", "vllm", "kv_cache_dtype", "fp8"),
        ('--vllm-speculative-config {"method":"mtp"}', "vllm", "speculative_config", {"method": "mtp"}),
        ("--vllm-uvicorn-log-level error", "vllm", "uvicorn_log_level", "error"),
    ],
)
def test_other_projects_flags_reach_their_fields(
    words: str, table: str, field: str, value: Any, tmp_path: Path
) -> None:
    overrides, _, _ = parse_flags(words.split())
    assert overrides == {table: {field: value}}
    inside = write(tmp_path, {}, f"[{table}]\n{field} = {toml(value)}\n")
    assert load_recipe(inside).values == overrides
    key = words.split()[0][2:].replace("-", "_")
    top = write(tmp_path, {key: True if isinstance(value, bool) else value})
    if not key.startswith("vllm_no"):
        assert load_recipe(top).values == overrides


def test_megatron_negative_switch_in_recipe(tmp_path: Path) -> None:
    """Megatron's own name of a switch turns it off in a recipe."""
    file = write(tmp_path, {"no_rope_fusion": False}, "[megatron]\ndisable_tp_comm_bulk_dgrad = true\n")
    assert load_recipe(file).values == {"megatron": {"apply_rope_fusion": True, "tp_comm_bulk_dgrad": False}}
    assert parse_flags(["--use-rotary-position-embeddings"])[0] == {"megatron": {"position_embedding_type": "rope"}}
    file = write(tmp_path, {"use_rotary_position_embeddings": True})
    assert load_recipe(file).values == {"megatron": {"position_embedding_type": "rope"}}
    with pytest.raises(UsageError, match="use_rotary_position_embeddings = false: expected true"):
        load_recipe(write(tmp_path, {"use_rotary_position_embeddings": False}))


def test_a_whole_table_as_json() -> None:
    overrides, _, _ = parse_flags(["--vllm", '{"max_num_seqs": 3}'])
    assert overrides == {"vllm": {"max_num_seqs": 3}}
    with pytest.raises(
        UsageError, match=r"--megatron: recompute_granularty.*unknown option; did you.*recompute_granularity\?"
    ):
        parse_flags(["--megatron", '{"recompute_granularty": "full"}'])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--padded-vocab-size 8", "config.json"),
        ("--params-dtype fp32", "use --bf16"),
        ("--vllm-tensor-parallel-size 2", "--rollout-num-gpus-per-engine"),
        ("--vllm-api-key k", "key of the run"),
        ("--vllm-model m", "--hf-checkpoint"),
        ("--finalize-model-grads-func f", "can be written"),
    ],
)
def test_what_hpcrl_decides_is_refused_with_the_reason(words: str, reason: str) -> None:
    with pytest.raises(UsageError, match="cannot be set") as error:
        parse_flags(words.split())
    assert reason in str(error.value) and words.split()[0] in str(error.value)


def test_every_owned_or_irregular_name_still_exists() -> None:
    fields = set(passthrough.settings("megatron") or ())
    assert {field for field, _ in passthrough.IRREGULAR.values()} <= fields
    assert set(passthrough.IRREGULAR) <= set(passthrough.spellings("megatron"))


@pytest.mark.usefixtures("bare")
def test_names_pass_without_packages() -> None:
    """Without the packages installed, names are taken as they are."""
    argv = '--recompute-granularity full --vllm-foo 3 --vllm-bar --vllm-no-baz --vllm-qux a 1 --lr 1 --moe-x [1,"a"] --swiglu --no-rope-fusion'.split()
    overrides, _, _ = parse_flags(argv)
    assert overrides == {
        "megatron": {
            "recompute_granularity": "full",
            "moe_x": [1, "a"],
            "gated_linear_unit": True,
            "apply_rope_fusion": False,
        },
        "vllm": {"foo": 3, "bar": True, "baz": False, "qux": ["a", 1]},
        "lr": 1.0,
    }


@pytest.mark.usefixtures("bare")
def test_own_misspelt_flag_without_packages() -> None:
    """Without the packages installed, a misspelt option of hpcrl is still found."""
    with pytest.raises(UsageError, match=r"did you mean --num-rollout\?"):
        parse_flags(["--num-rolout", "3"])
    with pytest.raises(UsageError, match="key of the run"):
        parse_flags(["--vllm-api-key", "3"])


# ---- unknown names and wrong types


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-rolout 3", r"--num-rolout.*unknown option; did you.*--num-rollout\?"),
        ("--num_rollout 3", r"--num_rollout.*unknown option; did you.*--num-rollout\?"),
        ("--recompute-granularty full", r"did you mean --recompute-granularity\?"),
        ("--vllm-max-num-seq 3", r"did you mean --vllm-max-num-seqs\?"),
        ("--zzzzzzzz", "see hpcrl run --help"),
        ("-n 3", "-n is an unknown option"),
        ("--num-rollout", "--num-rollout: expected a whole number >= 0, got nothing"),
        ("--num-rollout x", "--num-rollout.*expected a whole number >= 0"),
        ("--num-rollout 3.5", "--num-rollout 3.5: expected a whole number"),
        ("--lr fast", "--lr fast: expected a number >= 0"),
        ("--rollout-stop-token-ids 1 b", "--rollout-stop-token-ids 1 b: expected whole numbers"),
        ("--train-env-vars {", "--train-env-vars {: expected a JSON object"),
        ("--train-env-vars []", "expected a JSON object"),
        ("--bf16=yes", "--bf16 takes no value; turn.*--no-bf16"),
        ("--vllm-max-num-seqs many", "--vllm-max-num-seqs.*expected a whole number"),
        ("--recompute-granularity ful", "expected one of full,"),
    ],
)
def test_wrong_command_lines(words: str, message: str) -> None:
    """A wrong command line names flag, value and what was expected."""
    with pytest.raises(UsageError, match=message):
        parse_flags(words.split(maxsplit=1) if "{" in words else words.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_rolout = 3", r"recipe.toml: num_rolout.*unknown option; did you.*num_rollout\?"),
        ("num-rollout = 3", r"unknown option; did you.*num_rollout\?"),
        ("no_bf16 = true", "no_bf16 is an unknown option;.*bf16 = false"),
        ("stages = 3", r"unknown option; did you.*stage\?"),
        ('num_rollout = "3"', r'num_rollout = "3": expected a whole number >= 0'),
        ("bf16 = 1", "bf16 = 1: expected true or false"),
        ("seed = true", "seed =.*expected a whole number"),
        ("rollout_stop = ['a', 1]", "expected words"),
        ("lr = 2020-01-01", "expected a number"),
        ("prepare = 'make'", "prepare = .*expected a command"),
        ("prepare = [['a'], 'b']", "is not a command"),
        ("vllm = 3", "expected a table"),
        ("[vllm]\nmax_num_seq = 3", r"\[vllm\]: max_num_seq.*unknown option; did you.*max_num_seqs\?"),
        ("[vllm]\nmax_num_seqs = 'a'", r"\[vllm\] max_num_seqs = \"a\": expected a whole number"),
        ("[megatron]\nlr = 1", r"\[megatron\]:.*lr outside the table"),
        ("[megatron]\npadded_vocab_size = 1", r"\[megatron\]: padded_vocab_size cannot be set:"),
        ("[stage]\nname = 'a'", "begin each stage with"),
        ("[[stage]]\nlr = 1", "stage 1 has no name"),
        ("[[stage]]\nname = 'a/b'", "cannot be named .*a directory"),
        ("[[stage]]\nname = 'logs'", "valid as a directory"),
        ("[[stage]]\nname = 'a'\n[[stage]]\nname = 'a'", 'stage 2 cannot be named "a"'),
        ("[[stage]]\nname = 'a'\nrun_dir = 'x'", "stage a: run_dir has no effect"),
        ("[[stage]]\nname = 'a'\nlr_ = 1", r"stage a: lr_.*unknown option; did you.*lr\?"),
        ("a = [", "recipe.toml is not TOML"),
    ],
)
def test_a_wrong_recipe_names_file_and_key(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe(write(tmp_path, {}, text))


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the recipe .*none.toml: No such file"):
        load_recipe(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("overrides", "values", "message"),
    [
        ({"num_rollout": -3}, {}, "^--num-rollout -3: expected a whole number >= 0"),
        ({}, {"adam_beta1": 1.0}, "^r.toml: adam_beta1 = 1.0: expected a number >= 0 and < 1"),
        ({}, {"num_rollout": "3"}, '^r.toml: num_rollout = "3": expected a whole number'),
        ({}, {"train_env_vars": {"A": 1}}, "train_env_vars = .*valid string"),
        ({}, {"run_dir": "runs/{nam}"}, "only {name} and {time} may"),
        ({}, {"run_dir": "runs/{name:>99999999999}"}, "only {name} and {time} may"),
        ({}, {"run_dir": "runs/{name.__class__}"}, "only {name} and {time} may"),
        ({}, {"run_dir": "runs/{name!r}"}, "only {name} and {time} may"),
        ({}, {"run_dir": "runs/{name"}, "only {name} and {time} may"),
    ],
)
def test_a_value_out_of_bounds_names_its_origin(
    overrides: dict[str, Any], values: dict[str, Any], message: str
) -> None:
    one = recipe(GRPO | values)
    with pytest.raises(UsageError, match=message):
        resolve_stages(one, overrides, PLACES)[0]
    staged = recipe(GRPO, Stage("s", values))
    if values and "run_dir" not in values:
        with pytest.raises(UsageError, match="^r.toml: stage s: "):
            resolve_stages(staged, {}, PLACES)


# ---- recipes


def test_placeholders_are_filled_in_text_alone(tmp_path: Path) -> None:
    values = GRPO | {
        "hf_checkpoint": "{prepared}/model",
        "prompt_data": "{recipe}/p.jsonl",
        "rollout_stop": ["{run}", "{x}", "{"],
        "train_env_vars": {"D": "{run}/d"},
        "run_dir": "runs/{name}-{time}",
    }
    file = write(tmp_path, values)
    options = resolve_stages(load_recipe(file), {"load": "{run}/sft/checkpoints"}, PLACES)[0]
    assert options.hf_checkpoint == "/run/prepared/model" and options.load == "/run/sft/checkpoints"
    assert options.prompt_data == f"{tmp_path}/p.jsonl"
    assert options.rollout_stop == ["/run", "{x}", "{"] and options.train_env_vars == {"D": "/run/d"}
    assert options.run_dir == "runs/{name}-{time}" and options.name == "recipe"


def test_prepare_commands_environment(tmp_path: Path) -> None:
    """Prepare commands see the run, the recipe and the options."""
    import sys

    text = (
        'prepare = [["{python}", "{recipe}/a.py", "--out", "{prepared}"], ["echo", "{seed}", "{lr}", "{name}", '
        '"{other}"]]\nseed = 5\n'
    )
    read = load_recipe(write(tmp_path, {}, text))
    commands = read.prepare_commands(Path("/run"), {"lr": 0.5})
    assert commands == [
        [sys.executable, f"{tmp_path}/a.py", "--out", "/run/prepared"],
        ["echo", "5", "0.5", "recipe", "{other}"],
    ]
    one = load_recipe(write(tmp_path, {}, 'prepare = ["make", "data"]'))
    assert one.prepare == (("make", "data"),)


def test_copied_recipe_remembers_origin(tmp_path: Path) -> None:
    """A copy of a recipe remembers where it came from."""
    origin = Path("/elsewhere/quick.toml")
    read = load_recipe(write(tmp_path, {"hf_checkpoint": "{recipe}/m"}), origin=origin)
    assert (read.path, read.name) == (origin, "quick") and read.places({})["recipe"] == "/elsewhere"


def test_stages_come_in_order_with_tables_of_their_own(tmp_path: Path) -> None:
    text = "[[stage]]\nname = 'a'\nlr = 1.0\n[stage.vllm]\nmax_num_seqs = 2\n[[stage]]\nname = 'b'\n"
    read = load_recipe(write(tmp_path, {"name": "n"}, text))
    assert read.name == "n" and read.values == {}
    assert read.stages == (Stage("a", {"lr": 1.0, "vllm": {"max_num_seqs": 2}}), Stage("b", {}))
    assert load_recipe(write(tmp_path, {})).stages == (Stage("", {}),)


def test_what_differs_from_the_defaults() -> None:
    one = recipe(GRPO | {"vllm": {"max_num_seqs": 2}})
    shown = dict(changed(resolve_stages(one, {"bf16": False}, PLACES)[0]))
    assert shown == GRPO | {"name": "r", "bf16": False, "vllm.max_num_seqs": 2}


# ---- what fits together


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hf_checkpoint": None}, "give --hf-checkpoint"),
        ({"prompt_data": None}, "give --prompt-data"),
        ({"num_rollout": None}, "give --num-rollout or --num-epoch"),
        ({"advantage_estimator": "grpoo"}, "--advantage-estimator grpoo is unknown; known:"),
        ({"num_rollout": 0}, "leaves nothing to do"),
        ({"tensor_model_parallel_size": 2}, "1 trainer ranks.*TP x PP x.*= 2"),
        (
            {"expert_model_parallel_size": 2},
            "1.*cannot be divided into --expert-tensor-parallel-size 1 x --expert-model-parallel-size 2 x",
        ),
        (
            {"actor_num_gpus_per_node": 8, "pipeline_model_parallel_size": 2, "context_parallel_size": 3},
            "8 trainer ranks .* = 6",
        ),
        ({"rollout_num_gpus": None}, "--loss-type policy_loss needs engines; give --rollout-num-gpus"),
        ({"rollout_num_gpus": 0}, "needs engines"),
        ({"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2}, "--rollout-num-gpus 3 cannot be divided"),
        (
            {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4, "vllm": {"data_parallel_size": 3}},
            "--rollout-num-gpus-per-engine 4 cannot be divided by --vllm-data-parallel-size 3",
        ),
        ({"num_steps_per_rollout": 3}, "rollout of 128 samples .* --num-steps-per-rollout 3"),
        ({"global_batch_size": 5}, "rollout of 128 samples .* --global-batch-size 5"),
        (
            {"global_batch_size": 8, "num_steps_per_rollout": 2},
            "8 x --num-steps-per-rollout 2 is not a rollout.*128 samples",
        ),
        (
            {"actor_num_gpus_per_node": 3},
            "128.*step cannot be divided.*3 data-parallel ranks",
        ),
        ({"use_dynamic_batch_size": True}, "give --max-tokens-per-gpu"),
        ({"rm_type": None}, "give --rm-type or --custom-rm-path"),
        ({"custom_rm_path": "m.f"}, "exclude each other"),
        ({"label_key": None}, "--rm-type.*compares with the label;.*--label-key"),
        ({"rm_type": "maths"}, r"--rm-type.*did you mean math\?"),
        ({"rm_type": "boxed_gqpa"}, r"--rm-type boxed_gqpa.*did you mean boxed_gpqa\?"),
        ({"rm_type": "zzz"}, "there are dapo, deepscaler,.*;.*function of your own.*module.function"),
        ({"rm_type": ["math:1.0", "f1:much"]}, "--rm-type f1:much: 'much' is not"),
        ({"rm_type": ["math", "f1:0"]}, "--rm-type f1:0: '0' is not a weight"),
        ({"rm_type": ["math", "math:2"]}, "names math twice"),
        ({"rm_type": ["random", "f1"], "label_key": None}, "--rm-type f1 compares with the label"),
        ({"rm_type": "remote_rm"}, "server's address; give --rm-url"),
        ({"rm_type": "remote_rm", "rm_url": "host:80"}, "--rm-url host:80 is not an address"),
        ({"reward_key": "score"}, "--reward-key score has no effect.*--rm-type exact returns a number"),
        ({"rm_type": "dapo", "reward_key": "pred"}, "--reward-key pred: --rm-type dapo returns acc, score"),
        ({"group_rm": True}, "--group-rm has no effect here: --custom-rm-path is not given"),
        ({"rollout_max_context_len": 8, "rollout_max_prompt_len": 8}, "leaves no room"),
        ({"over_sampling_batch_size": 3}, "--over-sampling-batch-size 3 is less than --rollout-batch-size"),
        (
            {"dynamic_sampling_filter_path": "nonzero"},
            "a filter; there are check_reward_nonzero_std,.*module.function",
        ),
        (
            {
                "dynamic_sampling_filter_path": "check_reward_nonzero_std",
                "partial_rollout": True,
                "deterministic_mode": True,
            },
            "--partial-rollout and --deterministic-mode exclude each other",
        ),
        ({"eval_interval": 2}, "give --eval-prompt-data NAME PATH"),
        (
            {"eval_interval": 2, "eval_prompt_data": ["a", "p", "b"]},
            "takes pairs of NAME.*3 words",
        ),
        ({"eval_interval": 2, "eval_prompt_data": ["a.jsonl", "p"]}, "a.jsonl is not a name"),
        ({"eval_interval": 2, "eval_prompt_data": ["a b", "p"]}, "'a b' cannot be"),
        ({"eval_interval": 2, "eval_prompt_data": ["a-", "p"]}, "'a-' cannot be a name; .* no '-' at the end"),
        ({"eval_interval": 2, "eval_prompt_data": ["a", "p"], "eval_config": "e.yaml"}, "both name the held-out"),
        ({"prompt_data": ["p.jsonl", "p.jsonl"]}, "--prompt-data names p.jsonl twice"),
        ({"prompt_data": ["p.jsonl=2", "q.jsonl"]}, "q.jsonl has no weight, p.jsonl=2 has one"),
        ({"prompt_data": "p.jsonl=2"}, "weight has no effect"),
        ({"prompt_data": ["p.jsonl=0", "q.jsonl=1"]}, "'0' is not a weight"),
        ({"prompt_data": "p.jsonl@[1]"}, r"\[1\] is not a slice"),
        ({"apply_chat_template": False, "apply_chat_template_kwargs": {"a": 1}}, "--apply-chat-template is not given"),
        ({"eval_interval": 2, "eval_prompt_data": ["a", "p", "a", "q"]}, "gives a name twice"),
        ({"eps_clip_high": 0.1}, "--eps-clip-high 0.1 is lower than --eps-clip 0.2"),
        ({"lr_decay_style": "cosine", "min_lr": 1.0}, "--min-lr 1 is higher"),
        ({"lr_warmup_iters": 3}, "--lr-warmup-iters 3 is not less than.*3.*steps of the schedule"),
        ({"lr_warmup_iters": 9, "num_steps_per_rollout": 2}, "not less than the 6 optimizer steps"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4},
            "--lr-wsd-decay-iters 4 is more than the 3 optimizer steps",
        ),
        (
            {"n_samples_per_prompt": 1},
            "--n-samples-per-prompt is 1: every advantage would be 0; give --n-samples-per-prompt 8",
        ),
        (
            {"n_samples_per_prompt": 1, "disable_grpo_std_normalization": True},
            "--advantage-estimator grpo needs several responses",
        ),
        ({"eval_interval": 2, "eval_prompt_data": ["a", "p"], "label_key": None}, "compares with the label"),
        (
            {
                "weight_transfer": "disk",
                "check_weight_update_equal": True,
                "rollout_num_gpus": 2,
                "rollout_num_gpus_per_engine": 2,
                "vllm": {"data_parallel_size": 2},
            },
            "data-parallel parts alone",
        ),
        (
            {"weight_transfer": "ipc"},
            "engines on the trainer's.*--colocate is not given; give --colocate",
        ),
        (
            {"save_interval": 2, "non_persistent_save_interval": 4},
            "--non-persistent-save-interval has no effect here: --save-interval 2",
        ),
        ({"update_weight_disk_dir": "w"}, "--update-weight-disk-dir has no effect here: --weight-transfer is auto"),
    ],
)
def test_what_cannot_run_says_why(change: dict[str, Any], message: str) -> None:
    check_options(Options(**GRPO))
    with pytest.raises(UsageError, match=message):
        check_options(Options(**(GRPO | change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"label_key": None},
            "assistant's turns of chat.*--label-key, or --apply-chat-template",
        ),
        ({"eval_interval": 1, "eval_prompt_data": ["a", "p"], "rm_type": "exact"}, "--eval-interval needs engines"),
        ({"eval_interval": 1, "eval_prompt_data": ["a", "p"], "rollout_num_gpus": 1}, "give --rm-type"),
        ({"rm_type": "exact"}, "--rm-type has no effect here: .*no engine is used"),
        ({"rollout_num_gpus": 1}, "--rollout-num-gpus has no effect here"),
        ({"vllm": {"max_num_seqs": 1}}, "--vllm has no effect here"),
        ({"eps_clip": 0.3}, "--eps-clip has no effect here: --loss-type is sft_loss"),
    ],
)
def test_what_supervised_tuning_cannot_use(change: dict[str, Any], message: str) -> None:
    check_options(Options(**(SFT | {"rollout_num_gpus": 0})))
    with pytest.raises(UsageError, match=message):
        check_options(Options(**(SFT | change)))


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens_per_gpu": 9},
        {"micro_batch_size": 2, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 9},
        {"num_epoch": 2},
        {"min_lr": 1e-7},
        {"lr_decay_iters": 9},
        {"sequence_parallel": True},
        {"skip_eval_before_train": True},
        {"eval_prompt_data": ["a", "p"]},
        {"partial_rollout": True},
        {"mask_offpolicy_in_partial_rollout": True},
        {"max_staleness": 2},
        {"buffer_filter_path": "pop_first", "over_sampling_batch_size": 999},
        {"disable_grpo_std_normalization": True, "disable_rewards_normalization": True},
    ],
)
def test_an_option_without_effect_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(change)).replace('_', '-')} has no effect here"):
        check_options(Options(**(GRPO | change)))


def test_a_seed_without_anything_to_draw_is_an_error() -> None:
    check_options(Options(**(GRPO | {"rollout_seed": 1})))  # every sample is drawn
    with pytest.raises(UsageError, match="--rollout-seed has no effect here: --rollout-shuffle.*nothing is sampled"):
        check_options(Options(**(SFT | {"rollout_num_gpus": 0, "rollout_seed": 1})))


@pytest.mark.parametrize(
    "change",
    [
        {"n_samples_per_prompt": 1, "disable_rewards_normalization": True},
        {"n_samples_per_prompt": 1, "num_rollout": 0, "eval_interval": 1, "eval_prompt_data": ["a", "p"]},
        {"n_samples_per_prompt": 2},
        {"lr_warmup_iters": 2},
        {"lr_warmup_iters": 9, "num_rollout": 0, "eval_interval": 1, "eval_prompt_data": ["a", "p"]},
        {"lr_warmup_iters": 9, "lr_decay_iters": 10, "lr_decay_style": "linear"},
        {"lr_warmup_iters": 9, "num_rollout": None, "num_epoch": 1},
        {"lr_decay_style": "linear", "lr_warmup_fraction": 0.1, "num_rollout": None, "num_epoch": 1},
        {"num_rollout": 0, "eval_interval": 1, "eval_prompt_data": ["p.jsonl@[:9]"], "prompt_data": None},
        {"prompt_data": ["a.jsonl=2", "b.parquet@[:-5]=1e-1"]},
        {"eval_interval": 1, "eval_config": "{prepared}/is/not/there/yet.yaml"},
    ],
)
def test_what_only_looks_wrong_is_taken(change: dict[str, Any]) -> None:
    check_options(Options(**(GRPO | change)))


def test_whose_label_is_read() -> None:
    evaluated = GRPO | {"eval_interval": 1, "eval_prompt_data": ["a", "p"]}
    assert label_key(Options(**GRPO)) == "label"
    (held,) = eval_sets(Options(**(evaluated | {"eval_label_key": "answer"})))
    assert held.label_key == "answer"
    (held,) = eval_sets(Options(**(evaluated | {"rm_type": None, "custom_rm_path": "m.f", "label_key": None})))
    assert held.label_key is None and not held.needs_label
    sft = evaluated | {"loss_type": "sft_loss", "label_key": None, "eval_label_key": "answer"}
    assert eval_sets(Options(**sft))[0].label_key == "answer"
    with pytest.raises(UsageError, match="without --label-key learns the assistant's turns"):
        label_key(Options(**sft))
    assert label_key(Options(**(sft | {"apply_chat_template": True}))) is None
    pairs = {"loss_type": "dpo_loss", "rejected_key": "worse", "apply_chat_template": True}
    with pytest.raises(UsageError, match="--loss-type dpo_loss needs a label.*; give --label-key"):
        label_key(Options(**(sft | pairs)))


def test_a_default_that_is_not_megatrons_says_so() -> None:
    theirs = passthrough.read_fields("megatron.core.optimizer.optimizer_config", "OptimizerConfig") or {}
    theirs |= passthrough.read_fields("megatron.core.model_parallel_config", "ModelParallelConfig") or {}
    compared = 0
    for name, field in Options.model_fields.items():
        if name in theirs and field.json_schema_extra["source"] == "megatron":
            compared += 1
            same = str(field.default) == theirs[name].default or (name == "min_lr" and not field.default)  # none there
            assert same or "Megatron" in field.description, (
                f"--{name}: {field.default}, Megatron's is {theirs[name].default}"
            )
    assert compared >= 12
    assert "Megatron's default: linear" in Options.model_fields["lr_decay_style"].description  # of its training script


def test_saying_a_default_is_never_an_error() -> None:
    defaults = {n: f.get_default(call_default_factory=True) for n, f in Options.model_fields.items()}
    check_options(Options(**(defaults | GRPO)))
    check_options(Options(**(defaults | SFT)))


def test_options_said_to_be_inert_exist() -> None:
    for values in (
        GRPO,
        SFT,
        GRPO | {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 1, "disable_rewards_normalization": True},
    ):
        assert set(inert(Options(**values))) <= set(Options.model_fields)


def test_shared_options_need_one_stage() -> None:
    """An option shared by all stages must have an effect in at least one."""
    shared = {k: v for k, v in GRPO.items() if k != "num_rollout"}
    two = recipe(shared, Stage("sft", {"loss_type": "sft_loss", "num_rollout": 2}), Stage("grpo", {"num_rollout": 3}))
    first, second = resolve_stages(two, {"eps_clip": 0.3, "rollout_num_gpus": 2}, PLACES)
    assert (first.num_engines, second.num_engines) == (0, 2)
    with pytest.raises(UsageError, match="^stage sft: --max-tokens-per-gpu has no effect here"):
        resolve_stages(two, {"max_tokens_per_gpu": 9}, PLACES)
    own = recipe(shared, Stage("sft", {"loss_type": "sft_loss", "num_rollout": 2, "eps_clip": 0.3}), two.stages[1])
    with pytest.raises(UsageError, match="^stage sft: --eps-clip has no effect here"):
        resolve_stages(own, {}, PLACES)
