"""What is asked of a server that runs."""
