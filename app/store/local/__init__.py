"""The models and adapters on this machine: files of the cache, of a folder, and GGUF files."""
