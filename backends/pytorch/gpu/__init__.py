"""The memory of GPUs and NPUs: its free bytes, its limit and its read bandwidth, by the torch module of the device."""
