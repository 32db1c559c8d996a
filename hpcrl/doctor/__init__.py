"""Checks before anything runs: packages, directories, and with --nodes the nodes of a job.

Open `hpcrl/cli/doctor.py` first; `launch/node_checks/one_node.py` is what runs on a node,
`launch/node_checks/reports.py` judges what all of them say.
"""
