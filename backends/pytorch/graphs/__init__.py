"""Captured steps: a graph records the kernel launches of a step once and replays them with one launch."""
