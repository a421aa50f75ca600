"""The version of localllm. pyproject.toml reads it from this file, so a copy that is not installed also has it."""

VERSION = "0.1.0"
