"""Every trainer rank sends pieces of tensors straight to the workers that need them.

    piece_update.py        the driver's side: start here
    planning.py            the plan, from the trainer's table of tensors and the engines' manifests
    messages.py            its messages: what each rank sends and each host receives in each round
    wire.py                what ranks and workers learn once, as plain values
    elements.py            the elements of a piece: cast or quantised
    piece_sender.py        a rank's pieces, round by round
    peer_transport.py      messages over sockets and shared memory; device_transport.py (NCCL) and ipc_transport.py
                           (CUDA IPC, over device_memory.py) keep them on GPUs; choose_transport.py

The receiving end is hpcrl/engine/pieces/.
"""
