"""From bf16 to FP8 within one run."""
