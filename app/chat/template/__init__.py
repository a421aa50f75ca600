"""The chat template of a model: what it can show, the changes to conversations that it needs, and its rendering."""
