"""slime's own loss and estimators, taken by name out of a checkout of slime's, and run on samples of the tests.

A function is read out of its file without importing that file, whose imports want CUDA, Ray and Megatron; decorators
(torch.compile) are left out, and what it calls of other files is here: one context-parallel rank, log-probs that are
given, and the mean of samples over the trained tokens that each had before rejection.
"""

from __future__ import annotations

import ast
import contextlib
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.algorithms.batches import Sample, random_samples

PPO = "slime/utils/ppo_utils.py"
LOSS = "slime/backends/megatron_utils/loss.py"
MIS = "examples/train_infer_mismatch_helper/mis.py"
#: slime's defaults of what its loss and estimators read
DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "eps_clip": 0.2,
    "eps_clip_high": None,
    "eps_clip_c": None,
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "kl_coef": 0.0,
    "gamma": 1.0,
    "lambd": 1.0,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": None,
    "get_mismatch_metrics": False,
    "use_rollout_logprobs": False,
    "calculate_per_token_loss": False,
    "custom_pg_loss_reducer_function_path": None,
}
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
OF_MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
_MIS: dict[str, Any] = {
    "use_tis": True,
    "use_rs": False,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": 0.7,
    "tis_upper_bound": 1.3,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
    "tis_batch_normalize": False,
}
GROUPS = (4, 3, 3)  #: of the samples
#: flags, as a script of slime's has them -> the file that --custom-config-path would name, or None
CASES: dict[str, dict[str, Any] | None] = dict.fromkeys(
    [
        "",
        "--eps-clip 0.1 --eps-clip-high 0.28",
        "--eps-clip 0.1 --eps-clip-c 1.3",
        "--calculate-per-token-loss --eps-clip-high 0.28",
        "--entropy-coef 0.02",
        "--advantage-estimator gspo --eps-clip 0.03",
        "--advantage-estimator gspo --eps-clip 0.05 --calculate-per-token-loss --use-tis",
        "--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 0.3",
        *(f"--use-kl-loss --kl-loss-coef 0.3 --kl-loss-type {kind}" for kind in ("k1", "k2", "k3", "low_var_kl")),
        *(f"--use-kl-loss --kl-loss-coef 0.3 --kl-loss-type {kind} --use-unbiased-kl" for kind in ("k1", "k2", "k3")),
        "--use-opsm --opsm-delta 0.05",
        "--use-opsm --advantage-estimator gspo --eps-clip 0.05",
        "--use-tis",
        "--use-tis --tis-clip 1.1 --tis-clip-low 0.8",
        f"--use-tis --custom-tis-function-path {ICEPOP} --tis-clip 1.4 --tis-clip-low 0.7",
        f"--get-mismatch-metrics --custom-tis-function-path {ICEPOP} --tis-clip 1.4 --tis-clip-low 0.7",
        "--use-tis --advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 0.3 --entropy-coef 0.01",
        "--kl-coef 0.1",
        "--advantage-estimator reinforce_plus_plus --kl-coef 0.1 --kl-loss-type k2",
        "--advantage-estimator reinforce_plus_plus_baseline --kl-coef 0.1 --kl-loss-type k3",
    ]
)
_WITH = f"--custom-tis-function-path {OF_MIS} --custom-config-path mis.yaml"
_FILES: list[dict[str, Any]] = [
    *(
        {"tis_mode": mode, "tis_level": level}
        for mode in ("truncate", "clip", "mask")
        for level in ("token", "sequence")
    ),
    {"tis_level": "geometric", "tis_lower_bound": None},
    {"tis_mode": "clip", "tis_lower_bound": None},
    *({"use_rs": True, "rs_level": level, "rs_upper_bound": 1.2} for level in ("token", "sequence", "geometric")),
    {"use_rs": True, "rs_veto_threshold": 0.5, "tis_mode": "clip"},
    {"tis_batch_normalize": True},
    {"tis_batch_normalize": True, "tis_level": "sequence"},
    {"tis_batch_normalize": True, "tis_mode": "clip", "use_rs": True, "rs_veto_threshold": 0.4},
]
MIS_CASES = {f"{_WITH} #{number}": _MIS | file for number, file in enumerate(_FILES)}


def flags_of(case: str) -> list[str]:
    """The words of a case, without its number."""
    return case.partition("#")[0].split()


def samples_of(seed: int) -> list[Sample]:
    """What a case is computed on: holes in masks, an empty response, one that is masked out."""
    return random_samples(seed, groups=GROUPS)


def slime_arguments(case: str, file: Mapping[str, Any] | None) -> Namespace:
    """What slime's parser, and its reading of --custom-config-path, make of the flags."""
    values = dict(DEFAULTS)
    words = [*shlex.split(" ".join(flags_of(case))), "--"]
    for place, word in enumerate(words[:-1]):
        if word.startswith("--"):
            name, following = word[2:].replace("-", "_"), words[place + 1]
            default = DEFAULTS.get(name)
            given: Any = True if following.startswith("--") else following
            values[name] = float(given) if isinstance(default, float) or name.startswith("eps_clip") else given
    values.update(file or {})
    if values["eps_clip_high"] is None:
        values["eps_clip_high"] = values["eps_clip"]
    return Namespace(**values)


def functions(checkout: Path, file: str, shared: dict[str, Any]) -> dict[str, Any]:
    """The functions of a file at its top level, which find `shared` where they look for names."""
    return _alone(ast.parse((checkout / file).read_text()).body, file, shared)


def _alone(body: Sequence[ast.stmt], file: str, shared: dict[str, Any]) -> dict[str, Any]:
    """The functions among statements, without decorators and types, and what the file itself sets of names."""
    found = [node for node in body if isinstance(node, ast.FunctionDef)]
    for node in found:
        node.decorator_list = []
        node.returns = None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "Any": Any, **shared}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):  # what is no literal
                space[node.targets[0].id] = ast.literal_eval(node.value)
    exec(compile(ast.Module(body=list(found), type_ignores=[]), file, "exec"), space)
    space.update(shared)  # also in place of what some versions define in this file and others import
    return {node.name: space[node.name] for node in found}


def method(checkout: Path, file: str, owner: str, name: str, shared: dict[str, Any]) -> Callable[..., Any]:
    """A method of a class of a file, as a function of `self`."""
    tree = ast.parse((checkout / file).read_text())
    [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
    return _alone(cls.body, file, shared)[name]


def reducer(
    masks: Sequence[Tensor], counts: Sequence[Tensor], lengths: list[int], per_token: bool
) -> Callable[[Tensor], Tensor]:
    """slime's sum over samples of their means, or over tokens, on one context-parallel rank."""

    def reduce(values: Tensor) -> Tensor:
        parts = values.split(lengths, dim=0)
        sums = [(part * mask).sum() for part, mask in zip(parts, masks, strict=True)]
        return sum(sums if per_token else (s / n.clamp(min=1) for s, n in zip(sums, counts, strict=True)))  # type: ignore[return-value]

    return reduce


class SlimeLoss:
    """slime's policy loss of a checkout."""

    def __init__(self, checkout: Path) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        first = lambda tensor, *_: tensor  # noqa: E731
        shared: dict[str, Any] = {
            "all_gather_with_cp": first,
            "slice_log_prob_with_cp": first,
            "get_log_probs_and_entropy": lambda *_, **__: (None, self.seen),
            "get_rollout_top_p_logprob_kwargs": lambda *_: {},
            "_maybe_capture_log_probs": lambda *_: None,
            "get_sum_of_sample_mean": lambda _, lengths, masks, counts, per_token: reducer(
                masks, counts, lengths, per_token
            ),
            "load_function": lambda path: {
                ICEPOP: self.loss["icepop_function"],
                OF_MIS: self.mis["compute_mis_weights_with_cp"],
            }[path],
        }
        self.ppo = functions(checkout, PPO, shared)
        self.mis = functions(checkout, MIS, shared)
        self.loss = functions(checkout, LOSS, {**shared, **self.ppo})

    def __call__(self, args: Namespace, samples: Sequence[Sample]) -> tuple[float, list[float], dict[str, float]]:
        """(loss, its gradient at the trained tokens' log-probs, what is reported)."""
        lists = {
            name: [torch.from_numpy(getattr(sample, name)).clone() for sample in samples]
            for name in ("logprobs", "old", "rollout", "reference", "advantages", "entropy", "mask")
        }
        masks = [mask.double() for mask in lists["mask"]]
        for tensor in lists["logprobs"]:
            tensor.requires_grad_()
        self.seen = {"log_probs": list(lists["logprobs"]), "entropy": lists["entropy"]}
        lengths = [sample.length for sample in samples]
        counts = [mask.sum() for mask in masks]
        batch = {
            "advantages": lists["advantages"],
            "log_probs": lists["old"],
            "rollout_log_probs": lists["rollout"],
            "ref_log_probs": lists["reference"],
            "loss_masks": masks,
            "unconcat_tokens": None,
            "response_lengths": lengths,
            "total_lengths": [length + 1 for length in lengths],
            "rollout_mask_sums": counts,
        }
        logits = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        whole = reducer(masks, counts, lengths, args.calculate_per_token_loss)
        with one_rank():
            loss, report = self.loss["policy_loss_function"](args, batch, logits, whole)
        gradients = torch.autograd.grad(loss, lists["logprobs"], allow_unused=True)
        found = [
            gradient[mask.bool()] if gradient is not None else torch.zeros(int(mask.sum()))
            for gradient, mask in zip(gradients, masks, strict=True)
        ]
        return (
            float(loss.detach()),
            torch.cat(found).tolist(),
            {name: float(value.detach()) for name, value in report.items()},
        )

    def advantages(self, args: Namespace, samples: Sequence[Sample]) -> list[list[float]]:
        """Each sample's, one for each of its tokens; of rewards as they are, since slime's groups them elsewhere."""
        kl = [
            torch.zeros(sample.length, dtype=torch.float64)
            if not args.kl_coef
            else self.ppo["compute_approx_kl"](
                torch.from_numpy(sample.old), torch.from_numpy(sample.reference), kl_loss_type=args.kl_loss_type
            )
            for sample in samples
        ]
        rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
        masks = [torch.from_numpy(sample.mask).double() for sample in samples]
        lengths = [sample.length for sample in samples]
        if args.advantage_estimator == "reinforce_plus_plus":
            with one_rank():
                found = self.ppo["get_reinforce_plus_plus_returns"](
                    rewards, kl, masks, lengths, lengths, float(args.kl_coef), args.gamma
                )
        elif args.advantage_estimator == "reinforce_plus_plus_baseline":
            found = self.ppo["get_reinforce_plus_plus_baseline_advantages"](rewards, kl, masks, float(args.kl_coef))
        else:
            found = self.ppo["get_grpo_returns"](rewards, kl)
        return [tensor.tolist() for tensor in found]


class one_rank:
    """One context-parallel rank, for functions that import Megatron's or slime's where they run."""

    def __enter__(self) -> None:
        core = ModuleType("megatron.core")
        core.mpu = SimpleNamespace(get_context_parallel_world_size=lambda: 1)  # type: ignore[attr-defined]
        parts = ModuleType("slime.backends.megatron_utils.cp_utils")
        for name in ("all_gather_with_cp", "slice_log_prob_with_cp"):
            setattr(parts, name, lambda tensor, *_: tensor)
        above = ("megatron", "slime", "slime.backends", "slime.backends.megatron_utils")
        modules = {name: ModuleType(name) for name in above} | {core.__name__: core, parts.__name__: parts}
        self.before = {name: sys.modules.get(name) for name in modules}
        sys.modules |= modules

    def __exit__(self, *_: object) -> None:
        for name, module in self.before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
