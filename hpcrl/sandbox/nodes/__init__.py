"""Sandboxes on other machines than that of the process that uses them: nodes of their own, or the engines'.

    rollout process and its workers            a node with sandboxes
    `client.py` NodesPool  <-- CURVE, `wire.py` -->  `main.py`, `server.py`: a SandboxPool of boxes of that node

A `NodesPool` is used as a `SandboxPool` of this process is, and hands out the same `Box`es: what a box says goes over
the connection as it is, unread by the server.

Invariants: who connects has proved a key of this attempt (`hpcrl.transport.auth`); with a client ends every box that it
has; with a node every box there is lost, which its user is told as `SandboxLost`, and others are used.
"""
