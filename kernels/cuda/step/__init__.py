"""A decoder layer, or all layers of a step, in one kernel of a CUDA device."""
