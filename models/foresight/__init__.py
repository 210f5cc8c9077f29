"""What foretells which experts come next: a profile, and guesses made of it."""
