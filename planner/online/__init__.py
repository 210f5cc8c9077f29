"""The planner of a running group, which learns from measured times."""
