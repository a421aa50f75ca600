"""Which localllm this is; pyproject.toml reads it here, so that a copy that is not installed knows it too."""

VERSION = "0.1.0"
