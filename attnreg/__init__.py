"""One registry for all the attention kernels of a machine."""
