"""An engine larger than a host: one vLLM over several, without Ray.  Its server is on the first host, a part without
one on each of the others."""
