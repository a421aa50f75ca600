"""The transfer of `localllm pull`: from the addresses of a repository's files to complete files in the shared cache.

transfer     the threads; pause, resume, cancel
worklist     the work that is left, shared by the threads
worker       one connection: retries and mirrors
transport    connections below httpx; bodies in large blocks
http         redirects, access tokens, checked replies
failures     which failures another attempt may end
chunks       which connection downloads which bytes
partial      data, journal and hash of one file; states the order of the writes
journal      which chunks are complete
hasher       hashes and publishes large files; syncs all files
publish      snapshot and branch
disk         every write
lock         one process for each repository
leftovers    unfinished downloads in the cache
policy       every limit
progress, limiter
"""
