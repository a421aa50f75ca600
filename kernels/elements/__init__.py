"""Wrappers of the elementwise ops that the CPU library and the CUDA library both have: norms, gates, RoPE, embedding.

The tensors' device selects the library. Importing a wrapper loads the CPU library, which has the schemas, or raises
LibraryMissing.
"""
