"""--weight-update resharded: every trainer rank sends pieces of tensors straight to the workers that need them.

    planning.py  who holds and who needs, from the trainer's table and the engines' manifests, and the plan of it
    wire.py      what a worker is told of it once, as plain values
    numbers.py   the elements of a piece, cast and quantised as the engines want them
    bits.py      copies of elements whatever they mean
    outbox.py    a rank's pieces, round by round, into shared memory or sockets
    transport.py the driver's side of an update
    posts.py     how bytes go: post.py (sockets, shared memory), device_post.py (NCCL), ipc_post.py (CUDA IPC)

The receiving end is hpcrl/engine/pieces/.
"""
