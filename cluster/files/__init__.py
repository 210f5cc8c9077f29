"""Files that people name: models, hardware, logs."""
