"""The bundled checkpoint: its tasks, training and evaluation."""
