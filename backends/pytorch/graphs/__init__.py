"""Captured steps. A graph captures the kernel launches of a step once, and replays them with one launch."""
