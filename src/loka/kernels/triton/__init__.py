"""What all Triton kernels share: their launch, packed bytes, and the text of generated ones."""
