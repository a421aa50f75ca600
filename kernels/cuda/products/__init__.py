"""Products with packed weights on CUDA devices, by the number of rows: one, a small batch, many (tiled)."""
