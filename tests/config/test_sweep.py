"""The grid of a sweep: what its flags mean, the names of its runs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.flags import parse_flags
from hpcrl.config.recipe import Recipe, load_recipe, resolve_stages
from hpcrl.config.rules.several_adapters import adapter_options
from hpcrl.config.sweep import LONGEST, grid, read_axis, seed_axis, with_adapters
from hpcrl.config.value_types import Kind
from hpcrl.errors import UsageError
from tests.support.runs import REPO


@pytest.fixture(scope="module")
def quickstart() -> Recipe:
    return load_recipe(REPO / "examples/quickstart.toml")


def test_every_combination_once(quickstart: Recipe) -> None:
    """The last axis, which is the seeds', changes fastest; a value is what its flag would set."""
    axes = [read_axis("lr=1e-6,2e-6"), read_axis("grpo.kl-coef=0,1e-3"), seed_axis(quickstart, {"seed": 5}, 2)]
    runs = grid(axes, {"seed": 5, "num_rollout": 3})
    assert [run.name for run in runs[:3]] == [
        "lr=1e-06,grpo.kl-coef=0.0,seed=5",
        "lr=1e-06,grpo.kl-coef=0.0,seed=6",
        "lr=1e-06,grpo.kl-coef=0.001,seed=5",
    ]
    assert len(runs) == len({run.name for run in runs}) == 8
    assert runs[-1].flags == {"seed": 6, "num_rollout": 3, "lr": 2e-6, "grpo.kl_coef": 1e-3, "rollout_seed": 43}
    assert runs[-1].values == {"lr": 2e-6, "grpo.kl-coef": 1e-3, "seed": 6}


def test_each_sweep_flag_counts() -> None:
    words = ["--sweep", "lr=1,2", "--sweep=eps-clip=0.1,0.2", "--lr", "1"]
    assert parse_flags(words, {"sweep": Kind("str", adds_up=True)})[1] == {"sweep": ["lr=1,2", "eps-clip=0.1,0.2"]}


def test_switches_and_settings_of_other_packages() -> None:
    runs = grid([read_axis("use-kl-loss=true,false"), read_axis("vllm_max_num_seqs=8,16")], {"vllm": {"seed": 1}})
    assert runs[0].flags == {"use_kl_loss": True, "vllm": {"seed": 1, "max_num_seqs": 8}}
    assert runs[3].flags == {"use_kl_loss": False, "vllm": {"seed": 1, "max_num_seqs": 16}}
    assert runs[3].name == "use-kl-loss=false,vllm-max-num-seqs=16"


def test_switches_of_other_packages() -> None:
    """false is what the switch is without, also where no flag of one word says so."""
    for text, on, off in (
        ("vllm-enforce-eager=true,false", {"vllm": {"enforce_eager": True}}, {"vllm": {"enforce_eager": False}}),
        ("grpo.swiglu=true,false", {"grpo.megatron": {"gated_linear_unit": True}}, {"grpo.megatron": {"gated_linear_unit": False}}),
        ("no-rope-fusion=true,false", {"megatron": {"apply_rope_fusion": False}}, {"megatron": {"apply_rope_fusion": True}}),
        ("recompute-activations=true,false", {"megatron": {"recompute_granularity": "selective"}}, {}),
    ):  # fmt: skip
        axis = read_axis(text)
        assert (axis.values, axis.flags) == ((True, False), (on, off))
        assert [run.flags for run in grid([axis], {})] == [on, off]


def test_seeds_count_from_the_recipes_or_the_flags(quickstart: Recipe) -> None:
    """Data and sampling have a seed of their own, which counts as well."""
    assert seed_axis(quickstart, {}, 2).flags == (
        {"seed": 1234, "rollout_seed": 42},
        {"seed": 1235, "rollout_seed": 43},
    )
    assert [each["rollout_seed"] for each in seed_axis(quickstart, {"rollout_seed": 7}, 3).flags] == [7, 8, 9]
    with pytest.raises(UsageError, match=r"stage grpo .*--sweep grpo\.seed="):
        seed_axis(quickstart, {"grpo.seed": 3}, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lrr=1,2", "did you mean --lr"),
        ("lr=1,x", "--lr x: expected a number"),
        ("num-rollout=1,1.5", "expected a whole number"),
        ("lr=1", "write --lr 1"),
        ("lr=1,1.0", "1.0 is there twice"),
        ("lr", "expected OPTION=VALUE"),
        ("lr=1,,2", "expected OPTION=VALUE"),
        ("run-dir=a,b", "--run-dir cannot be swept"),
        ("grpo.name=a,b", "--grpo.name cannot be swept"),
        ("no-use-kl-loss=true,false", "--sweep use-kl-loss=true,false"),
        ("vllm-no-enforce-eager=true,false", "--sweep vllm-enforce-eager=true,false"),
        ("use-kl-loss=1,0", "expected true or false"),
    ],
)
def test_refused_values(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_axis(text)
    assert str(refused.value).startswith(f"--sweep {text}") and words in str(refused.value)


def test_one_option_one_place(quickstart: Recipe) -> None:
    lr, seeds = read_axis("lr=1,2"), seed_axis(quickstart, {}, 2)
    for axes, flags, both in (
        ([lr, read_axis("lr=3,4")], {}, "--sweep lr and --sweep lr"),
        ([lr], {"lr": 1.0}, "--sweep lr and --lr"),
        ([read_axis("seed=1,2"), seeds], {}, "--seeds and --sweep seed"),
        ([read_axis("rollout-seed=1,2"), seeds], {}, "--seeds and --sweep rollout-seed"),
        ([read_axis("vllm-max-num-seqs=1,2")], {"vllm": {"max_num_seqs": 1}}, "and --vllm-max"),
    ):
        with pytest.raises(UsageError, match=both):
            grid(axes, flags)
    assert len(grid([lr], {"grpo.lr": 1.0})) == 2, "another stage's"


def test_a_sweep_as_adapters_of_one_run() -> None:
    recipe = load_recipe(REPO / "examples/recipes/lora.toml")
    own = {"sweep": ["lr=1e-2,3e-3"], "seeds": 2}
    flags = with_adapters(recipe, {"num_rollout": 2}, own)
    assert flags["num_rollout"] == 2 and len(flags["adapter"]) == 4
    assert flags["adapter"]["lr=0.003,seed=1235"] == {"lr": 3e-3, "seed": 1235, "rollout_seed": 43}
    (options,) = resolve_stages(recipe, flags, {"run": "/run", "prepared": "/prepared"})
    assert [own.lr for own in adapter_options(options).values()] == [1e-2, 1e-2, 3e-3, 3e-3]


@pytest.mark.parametrize(
    ("file", "own", "told"),
    [
        ("recipes/lora.toml", {}, "without a sweep"),
        ("recipes/lora.toml", {"sweep": ["lora-rank=4,8"]}, "--lora-rank cannot be swept"),
        ("recipes/lora.toml", {"sweep": ["vllm-max-num-seqs=4,8"]}, "--vllm cannot be swept"),
        ("recipes/several_adapters.toml", {"sweep": ["lr=1,2"]}, "has adapters of"),
        ("quickstart.toml", {"sweep": ["lr=1,2"]}, "has stages"),
    ],
)
def test_what_is_no_sweep_of_adapters(file: str, own: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        with_adapters(load_recipe(REPO / "examples" / file), {}, own)


@pytest.mark.parametrize("values", [("/a/x.jsonl", "/a:x.jsonl"), ("/a/" + "x" * LONGEST, "/b/" + "x" * LONGEST)])
def test_names_are_directories(values: tuple[str, str]) -> None:
    """Whatever a value holds, names are unique, short, and one part of a path."""
    names = [run.name for run in grid([read_axis(f"prompt-data={','.join(values)}")], {})]
    assert len({*names}) == 2
    for name in names:
        assert len(name) < 200 and "/" not in name and ":" not in name
