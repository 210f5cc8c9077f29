"""What a checkpoint says of itself: one description of a model, names of tensors."""
