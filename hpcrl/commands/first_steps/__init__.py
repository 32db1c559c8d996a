"""Commands of a first hour: a folder to start from (`init.py`), what options there are (`options.py`), and their names
under the Tab key (`completion.py`)."""
