"""Models that others wrote, and a count of their FLOPs that is independent of LoKA.

They are plain PyTorch, TorchRec and Hugging Face. `registry.FOREIGN` lists them, `flops.py` counts. No file
here imports LoKA.
"""
