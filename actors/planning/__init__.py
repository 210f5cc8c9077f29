"""A rank and its planner: measured tasks there, plans back."""
