"""What a run knows of its engines, as files of the run directory."""
