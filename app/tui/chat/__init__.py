"""The chat screen from top to bottom: header, messages, dock (hints, prompt, status). compare is another screen."""
