"""Reads the output of a model: splits it into text, reasoning and tool calls."""
