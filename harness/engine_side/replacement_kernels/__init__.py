"""Replacement kernels: what computes in SGLang's place where a machine lacks the kernel."""
