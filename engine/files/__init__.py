"""Readers of model files: config.json, safetensors, GGUF and adapters. They use no tensor library."""
