"""The commands, one file each (or one for two or three that belong together): arguments in, text out.

`hpcrl/cli/main.py` names the function of every command.  `utils/arguments.py` is the parser of those that take no
options of a run, `find_run.py` finds the run that a user names and what is known of it.
"""
