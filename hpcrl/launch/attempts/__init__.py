"""Attempts, one after another: `attempt.py` runs one, seen from the launcher; `retries.py` says whether another one
follows on the same hosts, `host_processes.py` what of it lives on until then."""
