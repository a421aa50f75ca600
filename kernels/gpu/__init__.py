"""The common part of the CUDA C++ and Triton kernels: limits and properties of GPUs, and products."""
