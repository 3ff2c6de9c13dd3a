"""What each GEMM runs in, within limits on speed, error and KL/H."""
