"""The receiving end of --weight-update resharded: pieces become the parts of tensors that this worker holds."""
