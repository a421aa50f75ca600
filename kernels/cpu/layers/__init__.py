"""The smaller ops of a layer on the CPU: norms, gates, RoPE, embeddings, and writes to the paged cache."""
