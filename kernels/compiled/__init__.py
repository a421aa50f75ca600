"""Common parts of the compiled libraries, of the CPU and of CUDA devices: the search for them (library.py), and the
wrappers of the ops that both have: norms, gated activations, RoPE, the embedding.

The tensors' device selects the library. Importing a wrapper loads the CPU library, which has the schemas, or raises
LibraryMissing.
"""
