"""The phases of a rehearsed step, in order, by the names that reports and tables have for them."""

from __future__ import annotations

START = "start"
RESUME = "resume"
LOGPROBS = "log-probs"
TRAINS = "forward and backward"
STEP = "optimizer step"
SAVE = "save"
UPDATE = "weight update"
PHASES = (START, RESUME, LOGPROBS, TRAINS, STEP, SAVE, UPDATE)
