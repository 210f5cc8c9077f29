"""Worker loops: executor, expert server, channels, schedulers. Plain classes; Ray only in remote.py."""
