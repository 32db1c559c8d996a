"""Records what slime's own functions compute: `SLIME_CHECKOUT=DIR python -m tests.config.slime.record_numbers [COMMIT]`.

The numbers, with the functions and the commit that they come from, are in recorded/losses.json, which test_numbers.py
reads; nothing else of slime's is kept.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.config.slime.slime_functions import CASES, LOSS, MIS, MIS_CASES, PPO, SlimeLoss, samples_of, slime_arguments

FILE = Path(__file__).parent / "recorded" / "losses.json"
SEEDS = (11, 12)
SOURCES = {
    PPO: "compute_policy_loss compute_cispo_loss compute_gspo_kl compute_opsm_mask compute_approx_kl",
    LOSS: "policy_loss_function vanilla_tis_function icepop_function",
    MIS: "compute_mis_weights_with_cp",
}


def recorded(slime: SlimeLoss) -> dict[str, list[dict[str, Any]]]:
    """Case -> for each seed loss, gradient and report, to 10 digits."""
    short = lambda value: float(f"{value:.10g}")  # noqa: E731
    found: dict[str, list[dict[str, Any]]] = {}
    for case, file in {**CASES, **MIS_CASES}.items():
        for seed in SEEDS:
            loss, gradient, report = slime(slime_arguments(case, file), samples_of(seed))
            row = {
                "loss": short(loss),
                "gradient": [*map(short, gradient)],
                "report": {k: short(v) for k, v in report.items()},
            }
            found.setdefault(case, []).append(row)
    return found


def main() -> None:
    """Write the file."""
    slime = SlimeLoss(Path(os.environ["SLIME_CHECKOUT"]))
    commit = sys.argv[1] if len(sys.argv) > 1 else "not said"
    rows = ",\n".join(f" {json.dumps(case)}: {json.dumps(row)}" for case, row in recorded(slime).items())
    head = json.dumps({"commit": commit, "functions": SOURCES, "seeds": SEEDS})
    FILE.write_text(f'{{"from": {head},\n"cases": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    main()
