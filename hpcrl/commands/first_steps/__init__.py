"""Commands of a first hour: what options there are (`options.py`), and their names under the Tab key
(`completion.py`)."""
