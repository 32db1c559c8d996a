"""Run scripts of slime's, by what they hand to train.py: those of a family that is here go through whole, the others
are refused by name.  Of some it is an older version, as slime's users have them.

scripts.json: script -> its program, the published model that its MODEL_ARGS describe ("": of no family here, and
MODEL_ARGS stand among the arguments), and the arguments, shell variables filled in.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest
import yaml

from hpcrl.cli.main import main
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.config.slime.arguments import split_flags, translate
from hpcrl.config.slime.readers import SPECS
from hpcrl.config.slime.script_notes import model_families
from hpcrl.config.slime.verbatim import PLACES, recipe_and_refusals, recipe_of
from hpcrl.errors import UsageError, parts_of
from hpcrl.launch.preflight import drafting_notes, refuse_wrong_settings
from hpcrl.models.family import find_family, registry
from hpcrl.planning.formulas.engine_memory import update_bytes as engine_bytes
from hpcrl.planning.formulas.flops import model_flops
from hpcrl.planning.formulas.parameters import Layout, on_stage, whole_model
from hpcrl.planning.formulas.training_memory import fullest_rank
from hpcrl.planning.memory.weight_update import _bytes as sent_bytes
from tests.config.slime.guides import SCRIPT
from tests.config.slime.test_mis import SETTINGS as MIS_SETTINGS
from tests.support.able import needs
from tests.support.published_models import MODELS

SCRIPTS = json.loads(Path(__file__).with_name("scripts.json").read_text())
#: script -> (trainer ranks, engines, GPUs of one), and what of its resolved options shows that it was understood
HONOURED: dict[str, tuple[tuple[int, int, int], dict[str, object]]] = {
    "fully_async/run-qwen2.5-0.5B-fully_async": ((1, 1, 1), {"loop": "fully-async"}),
    "on_policy_distillation/run-qwen3-8B-opd-megatron": ((8, 8, 1), {"use_opd": True, "advantage_estimator": "none", "rm_type": None}),
    "search-r1/run_qwen2.5_3B": ((8, 4, 2), {"custom_generate_function_path": "generate_with_search.generate"}),
    "low_precision/run-qwen3-30B-A3B-int4": ((8, 8, 1), {"use_tis": True}),
    "low_precision/run-qwen3-4b-fp8": ((8, 4, 2), {"hf_checkpoint": "/root/Qwen3-4B-FP8"}),
    "run-glm4-9B": ((4, 2, 2), {"context_parallel_size": 2}),
    "run-glm4.7-355B-A32B": ((64, 2, 32), {"advantage_estimator": "gspo", "engine_tensor_parallel_size": 8, "sleep_level": 1}),
    "run-qwen2.5-0.5B-gb10-smoke": ((1, 1, 1), {"num_rollout": 1}),
    "run-qwen3-235B-A22B-sft": ((32, 0, 1), {"num_epoch": 3, "lr_decay_style": "cosine", "lr_warmup_fraction": 0.1}),
    "run-qwen3-30B-A3B": ((8, 1, 8), {"expert_model_parallel_size": 8}),
    "run-qwen3-4B-amd": ((8, 4, 2), {"colocate": True}),
    "run-qwen3-4B": ((8, 4, 2), {"colocate": True}),
    "multi_agent/run-qwen3-30B-A3B-multi-agent": ((8, 1, 8), {"rollout_max_context_len": 16384}),
    "retool/retool_qwen3_4b_rl": ((2, 1, 2), {"custom_rm_path": "generate_with_retool.reward_func", "reward_key": "score"}),
    "delta_weight_sync/run-glm4.7-355B-A32B-delta": ((64, 2, 32), {"weight_transfer": "auto"}),
    "run-llama3.2-3B-Instruct-amd": ((8, 4, 2), {"num_epoch": 1, "num_rollout": None}),
    "run-qwen3-235B-A22B": ((64, 2, 32), {"advantage_estimator": "gspo", "eps_clip": 4e-4, "engine_data_parallel_size": 4, "colocate": False}),
    "run-qwen3-32B": ((8, 1, 8), {"num_rollout": 5, "engine_tensor_parallel_size": 8}),
    "run-qwen3-4B-base-sft": ((8, 0, 1), {"loss_type": "sft_loss", "num_epoch": 3, "min_lr": 1e-6}),
    "run-qwen3-4B_4xgpu": ((4, 2, 2), {"colocate": True}),
    "run-qwen3-8B-amd": ((8, 4, 2), {"colocate": True, "global_batch_size": 256}),
    "low_precision/run-qwen3-30b-a3b-fp8": ((16, 2, 8), {"use_tis": True, "pipeline_model_parallel_size": 4}),
    "eval_multi_task/multi_task": ((8, 4, 2), {"eval_config": "/root/slime/examples/eval_multi_task/multi_task.yaml", "eval_interval": 20}),
    "fully_async/run-qwen3-4b-fully_async": ((4, 4, 1), {"loop": "fully-async", "reward_key": "score", "use_tis": True}),
    "tau-bench/run_qwen3_4B": ((2, 2, 1), {"custom_generate_function_path": "generate_with_tau.generate", "eval_top_k": 1}),
    "coding_agent_rl/run_qwen36_35b_a3b_swe_8nodes": ((64, 8, 8), {"context_parallel_size": 4, "expert_model_parallel_size": 8}),
    "run-qwen3.5-35B-A3B-sft": ((8, 0, 1), {"loss_type": "sft_loss", "num_epoch": 3}),
    "run-qwen3-next-80B-A3B": ((4, 2, 2), {"advantage_estimator": "gspo", "pipeline_model_parallel_size": 4}),
    "run-qwen3.5-27B": ((32, 16, 2), {"context_parallel_size": 4, "tensor_model_parallel_size": 4}),
    "strands_sglang/strands_qwen3_8b": ((8, 4, 2), {"custom_rm_path": "examples.strands_sglang.generate_with_strands.reward_func"}),
    "low_precision/run-moonlight-16B-A3B-int4": ((8, 2, 4), {"expert_model_parallel_size": 4}),
    "run-moonlight-16B-A3B": ((8, 1, 8), {"expert_model_parallel_size": 8}),
    "run-kimi-k2-Thinking": ((256, 16, 16), {"engine_data_parallel_size": 8, "use_tis": True}),
    "run-kimi-k2-Instruct": ((256, 16, 16), {"colocate": True}),
    "run-deepseek-r1": ((128, 2, 64), {"engine_data_parallel_size": 8, "colocate": True}),
    "run-glm4.5-355B-A32B": ((64, 2, 32), {"save_debug_rollout_data": "/mnt/data_{rollout_id}.pt"}),
    "retool/retool_qwen3_4b_sft": ((8, 0, 1), {"lr_warmup_fraction": 0.9, "lr_warmup_iters": 0, "num_epoch": 3}),
    "on_policy_distillation/run-qwen3-8B-opd": (
        (2, 4, 1), {"use_opd": True, "advantage_estimator": "none", "opd_type": "vllm", "opd_teacher_url": "http://127.0.0.1:13141"},
    ),
    "train_infer_mismatch_helper/run-qwen3-4b-mis": (
        (8, 8, 1), {"use_rs": True, "tis_clip": 2.0, "tis_clip_low": 0.5, "rs_veto_threshold": 1e-4, "tis_batch_normalize": True},
    ),
    "run-minimax-m2": ((32, 2, 16), {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4}),
    "run-mimo-7B-rl-eagle": ((8, 8, 1), {"mtp_num_layers": 1, "enable_mtp_training": True, "mtp_loss_scaling_factor": 0.2}),
}  # fmt: skip
#: script -> what is told of it, the beginning of each line
REFUSED: dict[str, list[str]] = {
    "geo3k_vlm/run_geo3k_qwen35": ["--spec slime_plugins.models.qwen3_5_vl "],
    "run-glm5.2-744B-A40B": [
        "--spec slime_plugins.models.glm5.glm5 ", "--allgather-cp: ", "--sglang-nsa-decode-backend flashmla_kv, --sglang-nsa",
        "--sglang-attention-backend nsa, --sglang-speculative-draft-attention-backend nsa: ",
        "--sglang-disaggregation-transfer-backend mooncake, --", "--sglang-config ",
    ],
    "reproducibility/run-qwen2.5-0.5B-gsm8k": ["--advantage-estimator grpo needs several responses to each prompt, and --n-sam"],
    "run-glm4.7-30B-A3B": ["--enable-mtp-training and --optimizer-cpu-offload exclude each other"],
    "run-glm5-744B-A40B": [
        "--spec slime_plugins.models.glm5.glm5 ", "--allgather-cp: ", "--prefill-num-servers 1: ", "--sglang-nsa-decode-backend ",
        "--sglang-attention-backend nsa: ",
    ],
    "low_precision/run-qwen3-235B-A22B-int4": ["--int4-params-rollout: no update can bring "],
    "low_precision/run-kimi-k2-Thinking-int4": ["--int4-params-rollout: no update can bring "],
    "geo3k_vlm/run_geo3k_vlm": ["--multimodal-keys "],
}  # fmt: skip


@pytest.fixture(autouse=True)
def settings_file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of settings that one script names by a path from where it runs, with what slime's has."""
    root = tmp_path_factory.mktemp("cwd")
    path = root / "examples/train_infer_mismatch_helper/mis.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(MIS_SETTINGS))
    monkeypatch.chdir(root)


def given(name: str) -> dict[str, str]:
    [found] = [script for path, script in SCRIPTS.items() if path.removesuffix(".sh").endswith(f"/{name}")]
    return found


FIRST = {given(name)["model"]: name for name in reversed(HONOURED)}  #: model -> its first script


def words_of(name: str) -> list[str]:
    """Program, MODEL_ARGS and the rest, as behind `--`."""
    script = given(name)
    flags = MODELS[script["model"]][0] if script["model"] else ""
    return [script["program"], *shlex.split(flags), *shlex.split(script["arguments"])]


def resolved(name: str) -> Options:
    return resolve_stages(recipe_of(words_of(name), {}), {}, PLACES)[0]


def test_every_script_has_its_outcome() -> None:
    assert len(SCRIPTS) == len(HONOURED) + len(REFUSED) == 49
    for name in (*HONOURED, *REFUSED):
        given(name)


@pytest.mark.parametrize("name", HONOURED)
def test_a_script_of_a_family_that_is_here(name: str) -> None:
    program, *words = words_of(name)
    translation = translate(words, program)
    flags = [line.flag for line in translation.lines if line.flag and line.flag != program]
    assert flags == list(split_flags(words)), "one line for every flag"
    assert not translation.wrong and all(line.reading.outcome != "refused" for line in translation.lines)
    options, (plan, shown) = resolved(name), HONOURED[name]
    assert (options.world_size, options.num_engines, options.rollout_num_gpus_per_engine) == plan
    assert {key: getattr(options, key) for key in shown} == shown


@pytest.mark.parametrize("name", HONOURED)
@needs("namespaces")
def test_imported_recipe_gives_same_options(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script is run, in its sandbox, without slime's file of its model's arguments."""
    script = given(name)
    kind = MODELS[script["model"]][1]["model_type"]
    model = next((file for file, family in model_families().items() if family == kind), "qwen3-4B")
    text = SCRIPT.format(model=model, words=shlex.join(shlex.split(script["arguments"])))
    (tmp_path / "run-x.sh").write_text(text.replace("python3 train.py", f"python3 {script['program']}"))
    assert main(["import", str(tmp_path / "run-x.sh")]) == 0
    (tmp_path / "recipe.toml").write_text(capsys.readouterr().out)
    imported = resolve_stages(load_recipe(tmp_path / "recipe.toml"), {"name": "x"}, PLACES)
    verbatim, _ = recipe_and_refusals([script["program"], *shlex.split(script["arguments"])], {})
    assert imported == resolve_stages(verbatim, {"name": "x"}, PLACES)


@pytest.mark.parametrize("name", HONOURED)
def test_model_arguments_match_config_json(name: str, tmp_path: Path) -> None:
    """What a script says of its model is what config.json says; of a model that sees images that of the text part."""
    config = MODELS[given(name)["model"]][1]
    if config["model_type"] == "qwen3_5":  # as engines take it
        config = {**config, "model_type": "qwen3_5_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse_wrong_settings([resolved(name).model_copy(update={"hf_checkpoint": str(tmp_path)})], same_packages=False)


@pytest.mark.parametrize("name", HONOURED)
def test_each_is_planned(name: str, tmp_path: Path) -> None:
    """Bytes of memory, operations and bytes of an update are those of the model that the script trains: every dense
    number is on one tensor-parallel rank, but for routers and the down projections of latent attention, on all."""
    config = MODELS[given(name)["model"]][1]
    family = find_family(config, name)
    options = resolved(name)
    layout = Layout.from_options(options, config["num_hidden_layers"])
    terms = fullest_rank(options, family, config)
    ranks = options.world_size // layout.pp
    stages = [on_stage(family, config, layout, stage, options.megatron) for stage in range(layout.pp)]
    whole = whole_model(family, config)
    assert sum(count.expert * layout.ep * layout.etp for count in stages) == whole.expert, "every expert is on a rank"
    names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "n_routed_experts", "num_experts", "num_local_experts")
    on_all = config["num_hidden_layers"] * config["hidden_size"] * sum(config.get(name) or 0 for name in names)
    dense = sum(count.dense for count in stages) * layout.tp - (layout.tp - 1) * on_all
    assert 0.995 < dense / whole.dense < 1.005 + 0.03 * layout.heads and ranks % layout.tp == 0
    assert 2 * min(count.trained for count in stages) <= terms.gpu["weights"] < terms.total < math.inf
    assert not options.num_engines or 0 < engine_bytes(options, family, config) < math.inf
    if name == FIRST[given(name)["model"]]:  # every expert of every layer is looked at, once for a model
        sent = sent_bytes(options, family, config) / whole.all  # FP8 matrices are sent as one byte
        assert 0.995 < sent / (1 if "quantization_config" in config else 2) < 1.02 + 0.03 * layout.heads
    work = model_flops(family, config)
    assert 0 < work.met + work.head <= whole.all and work.training(1000, 10**6, 1000) > 6 * work.met * 1000


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_of_another_family(name: str) -> None:
    with pytest.raises(UsageError) as error:
        resolved(name)
    told = [str(part) for part in parts_of(error.value)]
    assert len(told) == len(REFUSED[name])
    for line, begins in zip(told, REFUSED[name], strict=True):
        assert line.startswith(begins), line


@pytest.mark.parametrize(
    ("name", "flag", "words", "why"),
    [
        ("run-deepseek-r1", "sglang-enable-deepep-moe", "--vllm-enable-expert-parallel --vllm-all2all-backend deepep_lo", ""),
        ("run-deepseek-r1", "sglang-deepep-mode", "", "vLLM has deepep_low_latency for both"),
        ("run-glm4.5-355B-A32B", "save-debug-rollout-data", "--save-debug-rollout-data /mnt/data_{rollout_id}.pt", "over the one"),
        ("retool/retool_qwen3_4b_sft", "lr-warmup-iters", "", "--lr-warmup-fraction is given"),
        ("on_policy_distillation/run-qwen3-8B-opd", "rm-url", "--opd-teacher-url http://127.0.0.1:13141", "in place of SGLang"),
        ("on_policy_distillation/run-qwen3-8B-opd", "custom-rm-path", "", "asks the teacher itself"),
        ("on_policy_distillation/run-qwen3-8B-opd", "advantage-estimator", "--advantage-estimator none --use-opd --op", "no rewards"),
    ],
)  # fmt: skip
def test_what_changes_is_told(name: str, flag: str, words: str, why: str) -> None:
    program, *given_words = words_of(name)
    [line] = [line for line in translate(given_words, program).lines if line.flag == flag]
    assert " ".join(line.reading.words).startswith(words) and why in line.reading.why
    assert line.reading.outcome == ("translated" if words else "needless")


@pytest.mark.parametrize(
    ("without", "more"),
    [("--rm-url", ""), ("--custom-reward-post-process-path", ""), ("", "--use-opd"), ("", "--custom-rm-path mine.reward_func")],
)  # fmt: skip
def test_a_part_of_a_teacher_is_none(without: str, more: str) -> None:
    """The name of older releases stands for a teacher only with the functions and the address that make one."""
    _, *words = words_of("on_policy_distillation/run-qwen3-8B-opd")
    given_words = split_flags([*words, *more.split()])
    given_words.pop(without.removeprefix("--"), None)
    kept = [word for flag, values in given_words.items() for word in (f"--{flag}", *values)]
    assert any("--advantage-estimator on_policy_distillation" in str(error) for error in translate(kept).wrong)


ASKING = "slime.rollout.on_policy_distillation."
ASKED = (
    f"--use-opd --opd-type sglang --custom-rm-path {ASKING}reward_func --custom-reward-post-process-path "
    f"{ASKING}post_process_rewards --rm-url http://127.0.0.1:13141/generate"
)


def taught(more: str) -> list[str]:
    """The script of a teacher in the spelling of newer releases, where grpo is not named, as it is the default."""
    given_words = split_flags(words_of("on_policy_distillation/run-qwen3-8B-opd")[1:])
    for flag in ("advantage-estimator", "custom-rm-path", "custom-reward-post-process-path", "rm-url"):
        given_words.pop(flag)
    kept = [word for flag, values in given_words.items() for word in (f"--{flag}", *values)]
    return ["train.py", *kept, *more.split()]


@pytest.mark.parametrize(
    ("more", "rm_type"),
    [
        (f"{ASKED} --rm-type math", None),
        (f"{ASKED} --rm-type math --label-key label --eval-interval 5 --eval-prompt-data aime /a.jsonl", "math"),
        ("--use-opd --opd-type megatron --opd-teacher-load /t --rm-type math", None),
    ],
)
def test_a_teacher_without_an_estimator(more: str, rm_type: str | None) -> None:
    """None is what the teacher's run has; a reward stays where there are held-out responses to grade."""
    options = resolve_stages(recipe_of(taught(more), {}), {}, PLACES)[0]
    assert (options.advantage_estimator, options.use_opd, options.rm_type) == ("none", True, rm_type)


def test_held_out_responses_need_a_reward() -> None:
    (wrong,) = translate(taught(f"{ASKED} --eval-interval 5 --eval-prompt-data aime /a.jsonl")[1:]).wrong
    assert f"--custom-rm-path {ASKING}reward_func" in str(wrong) and "give --rm-type" in str(wrong)


@pytest.mark.parametrize(
    "module", ["examples.on_policy_distillation.on_policy_distillation.", "on_policy_distillation."]
)
def test_a_copy_of_slimes_functions_is_told(module: str) -> None:
    """A file of the user's own may be edited; slime's package is not."""
    told = []
    for name in (ASKING, module):
        lines = translate(taught(ASKED.replace(ASKING, name))[1:]).lines
        told.append(
            [line.reading.why for line in lines if line.flag.startswith("custom-re") or line.flag == "custom-rm-path"]
        )
    assert len(told[0]) == len(told[1]) == 2 and not any("edited" in why for why in told[0])
    assert all(module.rstrip(".") in why and "edited" in why for why in told[1])


def test_drafts_that_no_update_brings() -> None:
    """Of GLM's script, which trains no such layer, it is said; of MiMo's, whose updates bring it, nothing."""
    told = [drafting_notes([resolved(f"run-{name}")]) for name in ("mimo-7B-rl-eagle", "glm4.7-355B-A32B")]
    assert [len(lines) for lines in told] == [0, 1] and "--mtp-num-layers 1" in told[1][0]


def test_drafts_need_mtp_layers(tmp_path: Path) -> None:
    """Speculation needs a model with layers for it."""
    glm = resolved("run-glm4.7-355B-A32B")
    assert glm.vllm["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}
    (tmp_path / "config.json").write_text(json.dumps(MODELS["GLM-4.5"][1] | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UsageError, match='--vllm-speculative-config with "method": "mtp".*layers that predict further'):
        refuse_wrong_settings([glm.model_copy(update={"hf_checkpoint": str(tmp_path)})], same_packages=False)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--sglang-speculative-eagle-topk 4", "--sglang-speculative-eagle-topk 4: vLLM drafts a chain"),
        ("--sglang-speculative-algorithm EAGLE3", "only EAGLE with"),
        ("--sglang-speculative-draft-attention-backend nsa", "sglang's backends vLLM has"),
        ("--vllm-speculative-config {}", "--sglang-speculative-algorithm EAGLE and --vllm-speculative-config {} contradict"),
    ],
)  # fmt: skip
def test_what_drafts_cannot_be(more: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve_stages(recipe_of([*words_of("run-glm4.7-355B-A32B"), *more.split()], {}), {}, PLACES)
    assert told in str(error.value)


def test_inactive_speculation_settings() -> None:
    """Settings of a speculation that is not enabled pass."""
    translation = translate(["--sglang-speculative-num-steps", "3", "--sglang-speculative-eagle-topk", "4"])
    assert not translation.wrong and "vllm" not in translation.values
    (wrong,) = translate(["--sglang-speculative-algorithm", "EAGLE"]).wrong
    assert "give --sglang-speculative-num-steps" in str(wrong)


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ("--label-key label", ("grpo", "math")),
        ("--label-key label --rm-type random", ("grpo", "random")),
        ("--rm-type random", ("grpo", "random")),
        ("--eval-interval 5 --eval-prompt-data aime /a.jsonl --eval-label-key answer", None),
        ("--advantage-estimator gspo", None),
    ],
)
def test_a_distillation_with_labels_keeps_its_reward(more: str, outcome: tuple[str, str] | None) -> None:
    words = [*words_of("on_policy_distillation/run-qwen3-8B-opd-megatron"), *more.split()]
    if outcome is None:
        with pytest.raises(UsageError, match="--rm-type.*compares with the label;.*--label-key"):
            resolve_stages(recipe_of(words, {}), {}, PLACES)
        return
    options = resolve_stages(recipe_of(words, {}), {}, PLACES)[0]
    assert (options.advantage_estimator, options.rm_type) == outcome


@pytest.mark.parametrize("transport", ["nccl", "disk"])
def test_deltas_become_whole_updates(transport: str) -> None:
    words = words_of("run-glm4-9B") + f"--update-weight-mode delta --update-weight-transport {transport}".split()
    words += "--update-weight-delta-encoding overwrite --update-weight-disk-dir /d".split()
    options = resolve_stages(recipe_of(words, {}), {}, PLACES)[0]
    assert (options.weight_transfer, options.update_weight_disk_dir) == ("auto", None)
    whole = resolve_stages(recipe_of([*words, "--update-weight-mode", "full"], {}), {}, PLACES)[0]
    ways = {"nccl": ("auto", None), "disk": ("disk", "/d")}
    assert (whole.weight_transfer, whole.update_weight_disk_dir) == ways[transport]


def test_the_specs_are_those_of_the_families() -> None:
    assert {spec for family in registry().values() for spec in family.specs} == set(SPECS)
