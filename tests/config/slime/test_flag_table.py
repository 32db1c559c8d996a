"""Every flag of slime, vime and the Megatron and engine flags of their scripts has a verdict, and the verdicts are
true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.passthrough import spellings
from hpcrl.config.setting_names import find_flag, own
from hpcrl.config.slime.arguments import FlagVerdict, other_defaults, read_flag, says_default, translate, verdicts
from hpcrl.config.slime.readers import READERS
from hpcrl.errors import UsageError
from hpcrl.sandbox.slime_script import model_families
from tests.support.published_models import MODELS
from tools.slime_flags import main

FACTS = json.loads(Path(__file__).with_name("flags.json").read_text())
OWN = {flag: (kind, default) for flag, kind, default in FACTS["own"]}
ALL = sorted({*OWN, *FACTS["megatron"], *FACTS["engine"]})


def test_every_flag_has_a_verdict() -> None:
    """Every flag has a verdict, and every option that it names is one."""
    for flag in ALL:
        verdict = verdicts()[flag]
        if verdict.way == "option":
            assert find_flag(flag).field, flag
        elif verdict.way == "reader":
            assert verdict.text in READERS, flag
        elif verdict.way in ("needless", "refused", "later"):
            assert len(verdict.text.split()) > 2, f"--{flag}: a reason is a phrase"
            assert verdict.way == "later" or flag not in own(), f"--{flag} is an option now: say so in flags.toml"


@pytest.mark.parametrize("flag", sorted(flag for flag, verdict in verdicts().items() if verdict.way == "is"))
def test_what_goes_by_another_name_leads_to_an_option(flag: str) -> None:
    assert find_flag(verdicts()[flag].text).field


#: what a reason says that no family has -> the keys of config.json by which one would have it
ABSENT = {"indexer": ("index_n_heads",), "sparse attention": ("index_topk", "index_n_heads"), "experimental": ("dsa",)}
PRESENT = ("linear_num_value_heads", "num_experts", "kv_lora_rank")


def test_reasons_are_true_of_the_families() -> None:
    """A reason that something is in no family names what none has."""
    keys = {key for _, config, _ in MODELS.values() for key in (config | config.get("text_config", {}))}
    assert keys >= {*PRESENT}, "or the test could not fail"
    for reason in {verdict.text for verdict in verdicts().values() if "no family" in verdict.text}:
        absent = next(keys_of for words, keys_of in ABSENT.items() if words in reason)
        assert not keys & {*absent}, reason


def test_flags_of_a_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """New, gone and changed flags, from the calls in the source of the parsers."""
    parser = tmp_path / "slime" / "utils" / "arguments.py"
    parser.parent.mkdir(parents=True)
    parser.write_text(
        'parser.add_argument("--eps-clip", type=float, default=0.5)\nreset_arg(parser, "--lr", default=1e-6)\n'
        'parser.add_argument("--of-tomorrow", default=sum([]))\n'
    )
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "new: 1\n  --of-tomorrow\n" in said and "changed: 1\n  --eps-clip: 0.2 -> 0.5" in said
    assert "  --use-kl-loss\n" in said and "  --lr\n" not in said
    parser.write_text('parser.add_argument("--lr", default=1e-6)\n')
    assert main([str(tmp_path)]) == 0 and main([]) == 2


def test_slimes_lora_flags() -> None:
    """Its switch with its own defaults, presets of layers, and names of one's own; experts have an adapter each."""
    found = translate("--use-lora --lora-learning-rate 1e-5 --lora-rollout-sync-mode merged --save-lora x".split())
    assert not found.wrong
    assert (found.values["lora_rank"], found.values["lora_alpha"], found.values["lr"]) == (64, 128.0, 1e-5)
    assert found.values["target_modules"] == ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    assert found.values["lora_serve"] == "merged"
    found = translate("--use-lora --lora-rank 8 --lora-alpha 4 --lora-target-preset dense_attention".split())
    assert found.values["lora_rank"] == 8 and found.values["target_modules"] == ["linear_qkv", "linear_proj"]
    assert "an adapter each" in str(translate("--use-lora --lora-target-preset moe_mlp".split()).wrong[0])


def test_no_reader_is_left_over() -> None:
    assert {verdict.text for verdict in verdicts().values() if verdict.way == "reader"} == set(READERS)


def test_defaults_in_the_table_are_slimes() -> None:
    for flag, verdict in verdicts().items():
        if verdict.default is not None and flag in OWN:
            default = OWN[flag][1]
            assert verdict.default == default or [verdict.default] == default or default is None, flag


def test_default_values_are_never_refused() -> None:
    """A flag that only repeats slime's default is never refused."""
    for flag, (kind, default) in OWN.items():
        if default in (None, False, True, [], "") or isinstance(default, (dict, list)) or kind == "json":
            continue
        reading = read_flag(flag, {flag: [str(default)]})
        assert reading.outcome != "refused", f"--{flag} {default}: {reading.why}"


def test_whatever_is_declared_later_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = next(
        flag for flag, verdict in verdicts().items() if verdict.way == "later" and flag not in own() and "." not in flag
    )
    assert read_flag(flag, {flag: ["x.y"]}).outcome == "refused"
    monkeypatch.setattr("hpcrl.config.slime.arguments.own", lambda: {flag: None})
    assert read_flag(flag, {flag: ["x.y"]}).outcome == "kept"
    monkeypatch.undo()


def test_unlisted_flags() -> None:
    """Unlisted flags of Megatron and vLLM pass, and SGLang's are refused."""
    assert "moe-z-loss-coeff" in spellings("megatron") and translate(["--moe-z-loss-coeff", "0.1"]).values["megatron"]
    assert translate(["--vllm-max-num-seqs", "64"]).values["vllm"] == {"max_num_seqs": 64}
    (wrong,) = translate(["--sglang-mem-fraction", "0.7"]).wrong
    assert "--sglang-mem-fraction 0.7: the engines run vLLM" in str(wrong)
    (wrong,) = translate(["--rollout-batchsize", "4"]).wrong
    assert "did you mean --rollout-batch-size?" in str(wrong)


def test_other_defaults_differ_from_ours() -> None:
    from hpcrl.config.options import Options

    for flag, word in other_defaults().items():
        assert str(Options.model_fields[own()[flag].field].default) != word


def test_says_default() -> None:
    factor = FlagVerdict("refused", "x", 0.2)
    assert says_default(factor, ["0.2"]) and says_default(factor, ["0.20"])
    assert not says_default(factor, ["0.7"]) and not says_default(factor, ["x"]) and not says_default(factor, [])
    assert says_default(FlagVerdict("refused", "x", "nccl"), ["nccl"]) and not says_default(
        FlagVerdict("refused", "x"), ["nccl"]
    )


def test_every_model_file_names_a_family_that_there_is() -> None:
    from hpcrl.models.family import registry

    assert len(model_families()) == 39
    assert {family for family in model_families().values() if family} <= set(registry())


def test_a_broken_table_is_noticed() -> None:
    from hpcrl.config.slime.arguments import _verdict

    for said in ({"needless": "x", "refused": "y"}, {"needlss": "x"}, {"needless": 3}, {"refused": "x", "defalt": 1}):
        with pytest.raises(ValueError, match=r"flags\.toml: x = "):
            _verdict("x", said)


def test_unknown_engine_flags_are_errors_with_a_name() -> None:
    with pytest.raises(UsageError, match="no-such-flag"):
        find_flag("no-such-flag")


def test_a_flag_has_one_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sections may name it, if they say the same."""
    table: dict[str, Any] = {"a": {"x": {"refused": "no"}}, "b": {"x": {"refused": "no"}}, "defaults": {"y": "1"}}
    monkeypatch.setattr("hpcrl.config.slime.arguments._document", lambda: table)
    assert verdicts.__wrapped__() == {"x": FlagVerdict("refused", "no")}
    table["b"]["x"] = "option"
    with pytest.raises(ValueError, match="x has two verdicts"):
        verdicts.__wrapped__()
