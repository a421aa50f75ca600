"""LoRA products on the CPU."""
