"""Harbor's task folders as prompts, with their verifier's verdict as the reward.

    DIR/images.toml               which image of a task is which directory here        `task.py`
    DIR/TASK/task.toml            limits, times, environment                           `task_config.py`
    DIR/TASK/instruction.md       the prompt
    DIR/TASK/environment/         files of the working directory; or a Dockerfile, whose image the user has built
    DIR/TASK/tests/test.sh        writes /logs/verifier/reward.txt or reward.json
    DIR/TASK/solution/solve.sh    read by `python -m hpcrl.sandbox.harbor DIR` alone   `__main__.py`

`task.py` reads a folder, `rows.py` makes a prompt file of all of them, `verdict.py` has their box.  Written for the
schema versions 1.0 to 1.4; Harbor 0.26.0 writes 1.4 (PyPI's `harbor`, models/task/config.py there).

Invariant: whatever a task asks for that is not done here is one DataError that names its file, before anything runs.
"""
