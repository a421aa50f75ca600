"""LoRA products on CUDA devices."""
