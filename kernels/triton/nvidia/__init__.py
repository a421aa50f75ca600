"""The parts of Triton kernels that only NVIDIA GPUs have: inline assembly, and a driver without a C compiler."""
