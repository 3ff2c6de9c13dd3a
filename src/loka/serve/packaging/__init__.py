"""What runs without loka: a file of AOTInductor, and the folder for Triton Inference Server."""
