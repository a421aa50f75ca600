"""What the CUDA C++ kernels and the Triton kernels both use: the limits and the properties of GPUs, products."""
