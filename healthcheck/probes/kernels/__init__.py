"""Many tensors in one launch: Triton where it runs, torch's foreach kernels everywhere else."""
