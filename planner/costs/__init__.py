"""Cost models of tasks on given hardware, and their fits to measured times."""
