"""The rollout process: prompts in, graded groups of samples out.

Open `main.py` first: it answers the trainer's calls.  Then `generation/`, where a rollout is made, and `samplers/`,
which turn a prompt into samples; `engines/` sends their requests, `grading/` rewards what comes back, and `ledger/`
knows where every group is.  `inputs.py` reads everything that a run needs before it begins.
"""
