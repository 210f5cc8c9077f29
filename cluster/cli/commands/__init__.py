"""The commands of `tandem`, a file each: `add` declares its options, `run` does it.

Ray and torch take a second to import: only `run` does so, and --help need not wait.
"""
