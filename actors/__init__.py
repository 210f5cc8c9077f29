"""Worker loops: executor, expert server, channels, schedulers. Ray only in remote.py."""
