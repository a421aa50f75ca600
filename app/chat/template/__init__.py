"""The chat template of a model: its abilities, the changes to conversations that it needs, and its rendering."""
