"""Every op against its floor, the time its bytes or operations take at the ceilings measured beside it, and against
torch doing the same. `scripts/bench/kernels.py` runs it for the CPU and keeps the rows."""
