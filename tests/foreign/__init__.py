"""Models that others wrote: plain PyTorch, TorchRec and Hugging Face, with an independent account of their FLOPs.

No file of a model imports LoKA. `registry.FOREIGN` lists the models, `flops.py` counts.
"""
