"""The test cases of the ops, and the check of an implementation against the reference."""
