"""Anthropic's API: messages are converted to a chat, and the pieces of its answer to content blocks."""
