"""The smaller ops of a layer on CUDA devices: norms, gates, RoPE, embeddings, and writes to the paged cache."""
