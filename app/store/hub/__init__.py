"""Requests to the hubs: metadata, hashes, ranges of files, and the search."""
