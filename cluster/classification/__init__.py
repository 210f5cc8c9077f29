"""Classification as passes that score labels."""
