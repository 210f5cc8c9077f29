"""Training of the bundled models. Not part of the wheel."""
