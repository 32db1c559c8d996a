"""Sandboxes on other machines than that of the process that uses them: nodes of their own, or the engines'.

    rollout process and its workers       a node with sandboxes
    `client.py` NodesPool      HTTP -->   `main.py`, `server.py`: a SandboxPool of boxes of that node

A `NodesPool` is used as a `SandboxPool` of this process is, and hands out the same `Box`es: each question to a box is
one request, and the box's answer is its response.

Invariants: every request has the key of this attempt and server; with a client ends every box that it has; with a node
every box there is lost, its user gets `SandboxLost`, and other nodes are used.
"""
