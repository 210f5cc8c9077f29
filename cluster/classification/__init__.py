"""Classification as prefill-only passes that score labels."""
