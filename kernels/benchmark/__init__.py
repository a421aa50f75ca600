"""Benchmarks of ops: each measured time is compared with its bound and with the time of torch for the same work.

The bound is the minimum time for the bytes and operations of the op at peak rates measured in the same process.
`scripts/bench/kernels.py` runs the benchmarks on the CPU and saves the results.
"""
