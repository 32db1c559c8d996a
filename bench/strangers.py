"""How much longer honest calls take while strangers hold a thousand connections to the same port.

    python bench/strangers.py [--seconds 3] [--rounds 3]

As root, which makes a second account for the strangers (tests/support/second_user.py).  Each server is a process of its
own with another like it beside, which nobody attacks; one honest peer calls both in turn, so that the strangers' own work
and whatever else the machine does falls on both.  Told is the ratio of the median calls, the median of the rounds.

Bound that is checked: with idle connections, and with frames that no peer may send, less than 3 times, at every server.
Writes bench/results/strangers.md; the last line printed is one JSON object of ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from hpcrl.queue import frames  # noqa: E402
from tests.support.attacked import start  # noqa: E402
from tests.support.second_user import SecondUser, make_user  # noqa: E402
from tests.support.strangers import attack  # noqa: E402

OURS = ("idle", f"frames={frames.LIMIT}", "frames=8000000")
#: server -> what strangers send
KINDS = {
    "store": OURS,
    "queue": OURS,
    "engine": ("idle", "headers", "pipeline"),
    "endpoint": ("idle", "headers", "body", "pipeline"),
}
BOUND = 3.0
BOUNDED = {"idle", *OURS}


def measure(stranger: SecondUser, server: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Ratios of each kind of attack on a server, one of each round."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS[server]}
    with tempfile.TemporaryDirectory() as scratch:
        pair = [start(server, Path(scratch) / name) for name in ("attacked", "other")]
        try:
            for _ in range(rounds):
                for kind, ratios in found.items():
                    ratios.append(attack(stranger, kind, *pair, seconds=seconds).slower)
                    print(f"{server} {kind}: {ratios[-1]:.2f}", file=sys.stderr, flush=True)
        finally:
            for one in pair:
                one.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each attack")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    stranger = make_user()
    try:
        found = {server: measure(stranger, server, args.rounds, args.seconds) for server in KINDS}
    finally:
        stranger.end()
    lines = [
        f"{args.rounds} rounds of {args.seconds:g} s, 1,000 connections; load at the end {os.getloadavg()[0]:.1f}.",
        "",
        "| server | strangers send | calls take, times as long | least | most |",
        "|---|---|---|---|---|",
    ]
    medians = {}
    for server, kinds in found.items():
        for kind, ratios in kinds.items():
            medians[f"{server}_{kind}"] = middle = round(statistics.median(ratios), 2)
            lines.append(f"| {server} | {kind} | {middle:.2f} | {min(ratios):.2f} | {max(ratios):.2f} |")
    (REPO / "bench" / "results" / "strangers.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(json.dumps(medians))
    bounded = [value for name, value in medians.items() if name.partition("_")[2] in BOUNDED]
    return 0 if max(bounded) < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
