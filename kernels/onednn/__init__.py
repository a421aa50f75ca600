"""What oneDNN computes through torch, for Intel GPUs."""
