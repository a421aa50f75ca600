"""Captured steps: kernels that are launched one by one once, and replayed together afterwards."""
