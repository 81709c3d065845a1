"""What a machine has and what it is given: bundles, kernels, the doctor."""
