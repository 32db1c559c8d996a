"""The user's own modules: which a run imports (`own_modules.py`, by what `module_source.py` and
`paths_by_file.py` read from their source), which files are copied for them (`package_files.py`), the copies in the run
directory (`snapshot.py`), and whether these can be imported (`trial_import.py`)."""
