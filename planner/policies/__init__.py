"""Who goes next, and who waits: pure policies, a file each."""
