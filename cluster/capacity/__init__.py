"""What a cluster would do: plans, profiles, and what is off here."""
