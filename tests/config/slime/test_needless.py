"""Flags that pass without a setting here: why none of them can change a number.

Each is in one class of reasons, and each class has its test.  A reason that another test of hpcrl's shows is named by
that test, which must be there.
"""

from __future__ import annotations

import ast
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hpcrl.algorithms.loss import compute_loss
from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.passthrough import spellings
from hpcrl.config.setting_names import own
from hpcrl.config.slime.arguments import translate, verdicts
from hpcrl.config.slime.flag_reading import FlagReading
from hpcrl.config.slime.readers import READERS
from hpcrl.errors import UsageError
from hpcrl.report.metrics import MetricsLog
from hpcrl.run.rundir import RunDir
from tests.algorithms.batches import random_samples, token_batch
from tests.config.slime.guides import GUIDES
from tests.support.published_models import MODELS

ROOT = Path(__file__).parents[3]
NEEDLESS = {flag: verdict.text for flag, verdict in verdicts().items() if verdict.way == "needless"}
TRACKERS = (
    "use-tensorboard tb-project-name tb-experiment-name ci-save-grad-norm ci-load-grad-norm dump-details lora-debug"
).split()
LOGGED = ["use-rollout-entropy"]
#: how samples travel, requests are spread, processes are placed: no option of hpcrl's has such a choice
ONE_WAY = (
    "rollout-data-transport transfer-backend mooncake-store-init-kwargs rollout-data-dir rollout-queue-run-id "
    "rollout-storage-profile rollout-storage-declaration rollout-queue-segment-mib rollout-io-concurrency "
    "rollout-queue-online-gc vllm-router-policy use-slime-router router-policy use-distributed-post num-gpus-per-node "
    "train-memory-margin-bytes model-name megatron-to-hf-mode ci-test ci-disable-kl-checker "
    "disable-compute-advantages-and-returns rollout-queue-lease-seconds rollout-session-id rollout-cleanup-timeout "
    "rollout-routed-experts-store-dir routing-replay-prefetch-microbatches keep-rollout-routed-experts-files "
    "wandb-dir wandb-key wandb-host wandb-team disable-wandb-random-suffix wandb-always-use-train-step wandb-run-id"
).split()
#: settings of SGLang's whose counterpart vLLM does not let one set
OF_SGLANG = "sglang-enable-dp-attention sglang-enable-dp-lm-head sglang-moe-dense-tp-size sglang-enable-metrics".split()
OF_SGLANG += ["sglang-mamba-scheduler-strategy"]
#: flags that slime parses and reads nowhere; the checkout of slime's shows it
UNREAD = ("http-proxy", "min-batch-collection-ratio", "log-probs-max-tokens-per-gpu")
#: flag -> the test that shows its reason
SHOWN = {
    "padded-vocab-size": "tests/models/test_slicing.py::test_vocabulary_padding_is_zero",
    "make-vocab-size-divisible-by": "tests/models/test_slicing.py::test_vocabulary_padding_is_zero",
    "data-pad-size-multiplier": "tests/trainer/megatron/test_thd.py::test_padding_changes_nothing",
    "loss-mask-type": "tests/rollout/prompts/test_conversations.py::test_what_cannot_be_masked_exactly_is_refused",
    "no-position-embedding": "tests/trainer/megatron/test_model_parity.py::test_logits_are_those_of_transformers",
    "enable-experimental": "tests/trainer/megatron/test_model_parity.py::test_logits_are_those_of_transformers",
    "update-weight-disk-keep-files": "tests/weights/test_disk.py::test_model_directory_is_removed_later",
    "update-weight-local-checkpoint-dir": "tests/weights/test_disk.py::test_model_directory_is_removed_later",
    "update-weight-encoding": "tests/weights/pieces/test_pieces.py::test_two_updates_arrive_in_memory_and_over_sockets",
    "update-weight-delta-encoding": "tests/weights/pieces/test_pieces.py::test_two_updates_arrive_in_memory_and_over_sockets",
    "update-weight-delta-checksum": "tests/weights/pieces/test_pieces.py::test_two_updates_arrive_in_memory_and_over_sockets",
    "update-weight-delta-keep-files": "tests/weights/pieces/test_pieces.py::test_two_updates_arrive_in_memory_and_over_sockets",
    "sglang-update-weight-delta-chunk-bytes": "tests/weights/pieces/test_pieces.py::test_two_updates_arrive_in_memory_and_over_sockets",
    "vllm-weight-sync-packed": "tests/engine/pieces/test_borrowed_view.py::test_matrix_over_two_rounds",
    "rollout-health-check-interval": "tests/engine/test_health.py::test_server_answers_for_a_busy_core",
    "rollout-health-check-first-wait": "tests/engine/test_updates_and_ends.py::test_engine_hanging_during_start",
    "lora-adapter-name": "tests/engine/test_adapter.py::test_log_probs_are_those_of_merged_weights",
    "force-fp8-ue8m0-scale": "tests/engine/test_fp8_scales.py::test_scales_of_a_converted_checkpoint",
    "save-lora": "tests/models/convert/test_adapter.py::test_an_adapter_in_files",
    "lora-sync-from-tensor": "tests/engine/test_adapter_updates.py::test_adapters_of_ranks_in_an_engine",
    "sglang-watchdog-timeout": "tests/engine/test_health.py::test_call_lasts_as_long_as_its_caller_waits",
}
CLASSES = (TRACKERS, LOGGED, ONE_WAY, OF_SGLANG, UNREAD, SHOWN)


def test_each_needless_flag_has_one_reason() -> None:
    """No flag is needless without a test of its reason, and none has two."""
    named = [flag for group in CLASSES for flag in group]
    assert sorted(named) == sorted(NEEDLESS)


@cache
def before(guide: str) -> dict[str, Any]:
    return translate(GUIDES[guide][0]).values


@pytest.mark.parametrize("flag", NEEDLESS)
def test_it_sets_nothing(flag: str) -> None:
    """A run with the flag, whatever its value, has the options of the run without it, and a line that says why."""
    for words in ([], ["1"], ["x"], ["{}"]):
        for guide in ("Qwen3-4B, colocated", "GLM4-9B, 4 + 4"):
            found = translate([*GUIDES[guide][0], f"--{flag}", *words])
            assert found.values == before(guide) and not found.wrong
            assert [line.reading.why for line in found.lines if line.flag == flag] == [NEEDLESS[flag]]


def test_metrics_are_in_the_run_directory(rundir: RunDir) -> None:
    """Trackers: whatever is logged is in metrics.jsonl and TensorBoard's events, without a flag for it."""
    log = MetricsLog(rundir)
    log.truncate(0)
    log.append(0, {"train/grad_norm": 0.5})
    [row] = [json.loads(line) for line in rundir.metrics_file.read_text().splitlines()]
    assert row["train/grad_norm"] == 0.5
    assert list((rundir.root / "tensorboard").glob("*tfevents*"))
    for flag in TRACKERS:
        assert re.search(r"run directory|metrics\.jsonl", NEEDLESS[flag])


def test_the_entropy_is_always_logged() -> None:
    report = compute_loss(token_batch(random_samples(1)), Options()).report
    assert "entropy_loss" in report.means
    assert "ppo_kl" in report.means and "mis_kl" in report.counted, (
        "nor need engine and trainer be asked to be compared"
    )


@pytest.mark.parametrize("flag", [*ONE_WAY, *OF_SGLANG])
def test_there_is_nothing_of_that_name_to_set(flag: str) -> None:
    """No option of hpcrl's, Megatron's or vLLM's has this name: what it chooses is chosen by nothing else either."""
    names = (flag, flag.removeprefix("sglang-"), flag.removeprefix("vllm-"))
    for name in names:
        assert name not in own()
        assert name not in spellings("megatron")
    if flag in OF_SGLANG:
        assert flag.removeprefix("sglang-") not in spellings("vllm")
    with pytest.raises(UsageError):
        parse_flags([f"--{flag}", "x"])


@pytest.mark.parametrize("flag", SHOWN)
@pytest.mark.lint
def test_the_test_that_shows_it_is_there(flag: str) -> None:
    file, _, name = SHOWN[flag].partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_family_is_rotary() -> None:
    """--no-position-embedding keeps Megatron from learned positions, which no family has: each model is rotary."""
    for name, (flags, *_) in MODELS.items():
        assert "--use-rotary-position-embeddings" in flags or "--position-embedding-type rope" in flags, name


CHECKOUT = os.environ.get("SLIME_CHECKOUT", "")
checkout = pytest.mark.skipif(not CHECKOUT, reason="SLIME_CHECKOUT names no checkout of slime's")


@checkout
@pytest.mark.parametrize("flag", UNREAD)
def test_slime_reads_it_nowhere(flag: str) -> None:
    """But for its parser, nothing in slime names the argument."""
    name = re.compile(rf"\b{flag.replace('-', '_')}\b")
    files = [path for folder in ("slime", "slime_plugins") for path in Path(CHECKOUT, folder).rglob("*.py")]
    assert files
    assert not [path for path in files if path.name != "arguments.py" and name.search(path.read_text())]


#: given with what -> needless, of readers
NEEDLESS_BESIDE: list[tuple[str, str, str]] = [
    ("get-mismatch-metrics", "", "always compared"),
    ("ci-train-rollout-logprob-abs-diff-threshold", "1e-3", "--ci-test is not given"),
    ("megatron-config-path", "{critic}", "the defaults of"),
    ("vllm-tensor-parallel-size", "2", "follows from"),
    ("update-weight-mode", "full", "all tensors"),
    ("update-weight-transport", "nccl", "auto takes NCCL"),
    ("sglang-ep-size", "1", "not spread"),
    ("sglang-dp-size", "1", "not divided"),
    ("sglang-moe-a2a-backend", "none", "vLLM then chooses"),
    ("sglang-speculative-num-steps", "3", "is not given"),
    ("kl-coef", "0.1", "slime ignores it"),
    ("use-fault-tolerance", "", "resume"),
]


@pytest.mark.parametrize(("flag", "word", "why"), NEEDLESS_BESIDE)
def test_needless_by_its_value(flag: str, word: str, why: str, tmp_path: Path) -> None:
    """What a reader calls needless sets nothing either."""
    file = tmp_path / "roles.yaml"
    file.write_text("megatron: [{name: default, role: critic, overrides: {lr: 1e-5}}]")
    guide = "Qwen3-4B, colocated"
    words = [word.replace("{critic}", str(file))] if word else []
    given = list(GUIDES[guide][0])
    place = given.index("--kl-loss-coef")
    given[place : place + 2] = []
    without = translate(given).values
    found = translate([*given, f"--{flag}", *words])
    [reading] = [line.reading for line in found.lines if line.flag == flag]
    assert reading.outcome == "needless" and why in reading.why, reading
    assert found.values == without


#: what only looks needless
CHANGES: list[tuple[str, str]] = [
    ("--get-mismatch-metrics --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function", "use_tis"),
    ("--ci-test --ci-train-rollout-logprob-abs-diff-threshold 1e-3", "max_logprob_diff"),
    ("--advantage-estimator ppo --megatron-config-path {critic}", "critic_lr"),
    ("--sglang-ep-size 2", "vllm"),
    ("--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.1", "kl_coef"),
]


@pytest.mark.parametrize(("more", "option"), CHANGES)
def test_what_changes_a_number_is_set(more: str, option: str, tmp_path: Path) -> None:
    file = tmp_path / "roles.yaml"
    file.write_text("megatron: [{name: default, role: critic, overrides: {lr: 1e-5}}]")
    words = [*GUIDES["Qwen3-4B, colocated"][0], *more.replace("{critic}", str(file)).split()]
    place = words.index("--kl-loss-coef")
    words[place : place + 2] = []
    found = translate(words)
    assert not found.wrong, found.wrong
    assert found.values.get(option) not in (None, False, before("Qwen3-4B, colocated").get(option))


@pytest.mark.parametrize("more", ["", "--lr-warmup-iters 0", "--lr-warmup-fraction 0"])
def test_a_rate_that_would_differ_is_refused(more: str) -> None:
    """Without warm-up Megatron's inverse square root counts samples in slime, and steps here."""
    given = {"lr-decay-style": ["inverse-square-root"]} | ({more.split()[0][2:]: [more.split()[1]]} if more else {})
    reading: FlagReading = READERS["decay_style"]("lr-decay-style", given)
    assert reading.outcome == "refused" and "--lr-warmup-iters" in reading.why
    warm = READERS["decay_style"](
        "lr-decay-style", {"lr-decay-style": ["inverse-square-root"], "lr-warmup-iters": ["5"]}
    )
    assert warm.outcome == "kept"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("megatron: [{role: critic, overrides: {tensor_model_parallel_size: 4}}]", "tensor_model_parallel_size is 4"),
        ("megatron: [{role: reward, overrides: {lr: 1e-5}}]", "neither actor nor critic"),
        ("critic: {lr: 1e-5}", "no list named megatron"),
        ("megatron: [", "YAML"),
    ],
)
def test_roles_that_differ_otherwise_are_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "roles.yaml"
    file.write_text(text)
    words = [*GUIDES["Qwen3-4B, colocated"][0], "--advantage-estimator", "ppo", "--megatron-config-path", str(file)]
    assert any(said in str(error) and "--megatron-config-path" in str(error) for error in translate(words).wrong)


def test_a_role_that_says_the_same_passes(tmp_path: Path) -> None:
    """The guide has TP 2: a critic's TP 2 is what holds anyway."""
    file = tmp_path / "roles.yaml"
    file.write_text("megatron: [{role: critic, overrides: {tensor_model_parallel_size: 2, lr: 2e-5}}]")
    words = [*GUIDES["Qwen3-4B, colocated"][0], "--advantage-estimator", "ppo", "--megatron-config-path", str(file)]
    found = translate(words)
    assert not found.wrong and found.values["critic_lr"] == 2e-5
