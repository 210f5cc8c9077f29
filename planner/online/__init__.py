"""The planner that learns while it serves."""
