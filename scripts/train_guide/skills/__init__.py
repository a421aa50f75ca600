"""Skills whose questions and answers are computed rather than listed. Each is `make(random) -> Exchange`."""
