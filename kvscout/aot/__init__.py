"""Which kernels a model's calls ask for, found out on a machine without a GPU."""
