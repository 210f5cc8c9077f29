"""Description of a checkpoint: model spec and tensor names."""
