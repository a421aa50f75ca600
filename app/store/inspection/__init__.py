"""The facts about a model before it is downloaded or loaded, and the memory that it needs."""
