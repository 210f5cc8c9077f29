"""Commands of `tandem`: `add_*` declares a command's options, `run*` runs it.

Only `run*` imports Ray and torch, which take a second: `--help` stays fast.
"""
