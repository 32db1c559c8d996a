"""Where the members of a process group meet: a store of torch.distributed that lets in only who holds a key of the
run."""
