"""Captured steps: what is launched piece by piece once, and replayed as a whole from then on."""
