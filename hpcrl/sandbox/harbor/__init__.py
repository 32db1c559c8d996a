"""Harbor's task folders as prompts, with their verifier's verdict as the reward.

    DIR/images.toml               which image of a task is which directory here        `images.py`
    DIR/TASK/task.toml            limits, times, environment                           `task_config.py`
    DIR/TASK/instruction.md       the prompt
    DIR/TASK/environment/         a Dockerfile of the few instructions that need no build   `dockerfile.py`
    DIR/TASK/tests/test.sh        writes /logs/verifier/reward.txt or reward.json
    DIR/TASK/solution/solve.sh    read by `python -m hpcrl.sandbox.harbor DIR` alone           `check.py`

`task.py` reads a folder, `rows.py` makes a prompt file of all of them, `verdict.py` has their boxes.  Written for the
schema versions 1.0 to 1.4; Harbor 0.26.0 writes the latter (PyPI's `harbor`, models/task/config.py there).

Invariant: whatever a task asks for that is not done here is one DataError that names its file, before anything runs;
and a verdict is made in a box in which the policy has run nothing.
"""
