"""Gloo's connections prove who is at their other end before they are used.

gloo's whole greeting is a small number: the process that connects first with the right one is the rank, for that pair.
`gloo_groups.py` (start here) makes every gloo group of a process a proved one; `proof.py` and `pairs.py` are pure;
`exchange.py` runs the proof over a group, `addresses.py` is the store through which gloo finds its peers, and
`connections.py` asks the kernel who is connected.
"""
