"""What the backends of GPUs share: probes, memory, read bandwidth, checks of graphs, and Triton's part in a load."""
