"""Grading: rewards run in processes of their own, each grading with limits of CPU time, clock time and memory.

    service.py    `Grading` hands samples to the processes, bounds every grading, replaces what has to be killed,
                  counts failures
    grader.py     in a worker process: finds a reward by its name or path, calls it, makes numbers of what it returns

Invariant: no response and no reward can block, crash or exhaust the rollout process; a grading that fails is a 0 that
is counted, logged and written with its sample, and never goes unnoticed.
"""
