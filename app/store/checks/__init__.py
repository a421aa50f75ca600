"""Checks of files: headers, architecture, tokenizer and chat template. Reads no weights."""
