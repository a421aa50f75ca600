"""Downloads: their plan, the check before the weights, and the work in the background."""
