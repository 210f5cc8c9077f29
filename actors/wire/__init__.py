"""What a rank says to its clients, and hears."""
