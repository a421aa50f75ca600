"""Products with packed weights of every format on the CPU."""
