"""Images of boxes: unpacked root directories, and what a node has made once for its boxes (`staging.py`)."""
