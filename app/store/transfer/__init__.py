"""The transfer of `localllm pull`: from the addresses of a repository's files to complete files in the shared cache."""
