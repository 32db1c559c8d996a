"""Images of boxes that are files: of Apptainer (SIF), of Docker (`docker save`), of OCI; unpacked once a node.

    `staging.py`    which image a path is, and the directory of this node where it lies unpacked
    `archives.py`   what a Docker archive or an OCI layout says of its layers
    `tree.py`       layers, one over the other, into a directory
    `streams.py`    their bytes, read forward within bounds
    `sif.py`        the file system in a SIF file

Invariant: whatever an image holds, nothing is written outside the directory that it is unpacked into, nor more than its
bounds; and a directory that is handed out holds the whole image.
"""
