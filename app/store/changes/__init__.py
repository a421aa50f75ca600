"""Changes of the store: imports, deletions, aliases and settings of models, and the installation of llama.cpp."""
