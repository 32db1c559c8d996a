"""What spans are called, and what each of them costs.

Invariant: whoever records a span and whoever reads it take its name from here.
"""

from __future__ import annotations

import re
from typing import Literal

#: launcher: the recipe's prepare commands; one attempt of a stage, and that it begins
PREPARE = "prepare"
ATTEMPT = "attempt"
BEGINS = "attempt begins"
#: any role: from its first line until it can work
START = "start up"
#: the process of a host: its roles, from the first start to the last end
ROLES = "roles"
#: whoever brings engines to a run that is under way: which, as {number: slots} in `engines`; and when it is gone
JOINS, ENDS = "joins", "ends"
#: trainer.  READY and SAVED are moments, with rollout_id: where the run goes on, and up to where it is on disk
READY = "ready"
SAVED = "saved"
STEP = "step"
WAIT = "wait for data"
TRAIN = "train"
LOGPROBS = "forward log-probs"
UPDATE = "update weights"
PAUSED = "engines pause"
SAVE = "save"
EVALUATE = "evaluate"
#: rollout process: the making of a rollout; an engine that has requests, with its number as `engine`; requests in
#: flight (a counter)
MAKE = "make rollout"
GENERATE = "generate"
REQUESTS = "#requests in flight"

Cost = Literal["training", "generating", "waiting", "updating", "saving", "starting", "lost"]
COSTS: tuple[Cost, ...] = ("training", "generating", "updating", "saving", "waiting", "starting", "lost")
#: where a slot has several owners at work, the first of these counts
PRECEDENCE: tuple[Cost, ...] = ("training", "updating", "saving", "generating", "starting")
#: role -> name -> what the slots that the process owns do meanwhile; anything else is waiting
DOES: dict[str, dict[str, Cost]] = {
    "trainer": {TRAIN: "training", UPDATE: "updating", SAVE: "saving"},
    "engine": {GENERATE: "generating", PAUSED: "updating", START: "starting"},
    "rollout": {MAKE: "generating", EVALUATE: "generating"},
}
ROLES_IN_ORDER = ("launcher", "host", "joined", "trainer", "rollout", "engine")


def order(track: str) -> tuple[int, str, int]:
    """Where a track stands among others: by role, then number."""
    role = re.split(r"[- ]", track)[0]
    number = re.search(r"-(\d+)$", track)
    place = ROLES_IN_ORDER.index(role) if role in ROLES_IN_ORDER else len(ROLES_IN_ORDER)
    return place, track if number is None else role, int(number[1]) if number else 0
