"""What goes wrong with machines, in words: file systems (storage.py), memory (memory.py), hardware (hardware.py); and
what those leave behind that were killed (scratch.py)."""
