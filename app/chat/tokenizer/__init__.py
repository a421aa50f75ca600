"""The tokenizer of a model folder or of a GGUF file."""
