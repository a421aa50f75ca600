"""The chat screen and its parts, from top to bottom: header, messages, hints, prompt, status."""
