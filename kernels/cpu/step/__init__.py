"""A decoder layer, or all layers of a step, in one call on the CPU."""
