"""What computes or carries in SGLang's place where a machine lacks the kernel or the network."""
