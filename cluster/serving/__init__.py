"""The HTTP front, the application around it, and the Ray session that they run in."""
