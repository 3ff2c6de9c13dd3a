"""One step: forward, backward, its capture as a CUDA graph, its time."""
