"""Flags of a recipe with stages: --STAGE.option in one, --option in all, and what a run directory keeps of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hpcrl.cli.evaluate import recipe_for
from hpcrl.cli.main import HELP
from hpcrl.config.flags import flag_words, parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, load_recipe, resolve_stages
from hpcrl.config.slime.verbatim import recipe_of
from hpcrl.errors import UsageError
from hpcrl.launch.job import begin_job, reopen_job
from hpcrl.run.started_runs import RECIPE, RecipeFile

REPO = Path(__file__).parents[2]
QUICK = REPO / "examples" / "quickstart.toml"
PLACES = {"run": "/run", "prepared": "/run/prepared"}


def resolved(words: str, recipe: Recipe | None = None) -> tuple[Options, ...]:
    """(sft, grpo) of the quick start with these flags."""
    return resolve_stages(recipe or load_recipe(QUICK), parse_flags(words.split())[0], PLACES)


def test_a_flag_of_a_stage_counts_there_alone() -> None:
    sft, grpo = resolved("--grpo.lr 2e-5 --sft.num-rollout=10 --grpo.no-rollout-shuffle --grpo.vllm-max-num-seqs 64")
    assert (sft.lr, grpo.lr, sft.num_rollout, grpo.num_rollout) == (5e-3, 2e-5, 10, 40)
    assert (sft.rollout_shuffle, grpo.rollout_shuffle) == (True, False)
    assert (sft.vllm, grpo.vllm) == ({}, {"max_num_seqs": 64})


def test_plain_flag_scope() -> None:
    """A plain flag applies to every stage, also where its table sets the option; that of a stage comes before it."""
    sft, grpo = resolved("--lr 1e-3 --save-interval 5 --sft.save-interval 6 --seed 7 --vllm-max-num-seqs 64")
    assert (sft.lr, grpo.lr, sft.save_interval, grpo.save_interval) == (1e-3, 1e-3, 6, 5)
    assert (sft.seed, grpo.seed) == (7, 7) and sft.vllm == grpo.vllm == {"max_num_seqs": 64}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--grop.lr 1 --warm.lr 1", "2 things are wrong"),
        ("--eval-interval 6", "stage sft: --eval-interval needs held-out prompts"),
        ("--grop.lr 1", r"^--grop.lr: quickstart.toml.*stage grop; did you.*--grpo.lr\?"),
        ("--warm.lr 1", "stages are sft, grpo"),
        ("--grpo.lrr 1", r"^--grpo.lrr.*unknown option; did you.*--grpo.lr\?"),
        ("--grpo.lr x", "^--grpo.lr x: expected a number"),
        ("--grpo.lr -1", "^--grpo.lr -1.0: expected a number >= 0"),
        ("--grpo.run-dir x", "^--grpo.run-dir has no effect"),
        ("--grpo.min-lr 1", "^stage grpo: --min-lr has no effect here: --lr-decay-style is constant"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolved(words)


def test_a_recipe_without_stages_has_none_to_name() -> None:
    dpo = load_recipe(REPO / "examples" / "algorithms" / "dpo.toml")
    with pytest.raises(UsageError, match=r"^--sft.lr: dpo.toml has no stages; write --lr$"):
        resolved("--sft.lr 1", dpo)
    with pytest.raises(UsageError, match=r"--sft.lr 1: arguments of train.py have no stages|--sft.lr"):
        recipe_of(["--sft.lr", "1"], {})


def test_the_script_of_a_job_gives_the_same_flags() -> None:
    words = "--grpo.lr 2e-5 --grpo.vllm-max-num-seqs 64 --seed 7 --no-bf16 --grpo.colocate --rollout-stop a b"
    flags, _, _ = parse_flags(words.split())
    assert parse_flags(flag_words(flags))[0] == flags


def test_run_keeps_flag_scope(tmp_path: Path) -> None:
    """A run keeps the scope of its flags."""
    flags, _, _ = parse_flags(["--grpo.eval-interval", "6", "--sft.lr", "1e-3", "--seed", "7"])
    job = begin_job(load_recipe(QUICK), flags | {"run_dir": str(tmp_path / "new")}, here=False)
    again = reopen_job(job.root)
    assert (
        again.stages == job.stages
        and [o.lr for o in again.stages] == [1e-3, 2e-4]
        and again.stages[1].eval_interval == 6
    )
    kept = msgspec.json.decode((job.root / RECIPE).read_bytes(), type=RecipeFile)
    plain = RecipeFile(kept.identity, kept.path, {"lr": 1e-4, "seed": 7})
    (job.root / RECIPE).write_bytes(msgspec.json.encode(plain))
    assert [(o.lr, o.seed) for o in reopen_job(job.root).stages] == [(1e-4, 7), (1e-4, 7)]


def test_evaluation_takes_its_stages_flags() -> None:
    """An evaluation takes the flags of the stage that it evaluates."""
    flags, _, _ = parse_flags(["--load", "/c", "--grpo.eval-temperature", "0.5", "--rollout-max-response-len", "20"])
    recipe, mine = recipe_for(QUICK, flags)
    (options,) = resolve_stages(recipe, mine, PLACES)
    assert (options.load, options.eval_temperature, options.rollout_max_response_len) == ("/c", 0.5, 20)
    with pytest.raises(UsageError, match="^--sft.lr.*effect here: stage grpo.*quickstart.toml is evaluated"):
        recipe_for(QUICK, {"load": "/c", "sft.lr": 1.0})


def test_help_examples_resolve() -> None:
    """Every example of the help resolves and changes what it names."""
    text = HELP.split("examples\n")[1].split("\n\n")[0].replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines()]
    assert len(lines) == 3 and all(line[:3] == ["hpcrl", "run", "examples/quickstart.toml"] for line in lines)
    first, short, passed = (resolved(" ".join(line[3:])) for line in lines)
    assert short[0].num_rollout == first[0].num_rollout and short[1].num_rollout == 20 and short[1].eval_interval == 5
    assert passed[1].megatron["recompute_granularity"] == "selective" and passed[1].vllm == {"max_num_seqs": 64}
