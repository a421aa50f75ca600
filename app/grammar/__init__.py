"""Grammars: JSON schemas and patterns, and the matchers that mask the tokens of an answer."""
