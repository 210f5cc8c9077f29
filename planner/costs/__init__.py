"""What a task of a model takes on given hardware, and how that is fitted to what was measured."""
