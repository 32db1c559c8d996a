"""What a run directory tells of its run: metrics, progress, status, samples, timelines, and one HTML page of them all.

Open `run_files.py` first (how the files of a run are read), then `run_status.py` (what the run is doing).  `timeline/`
is what every process did when, and what it cost.
"""
