"""From waiting sequences to a batch, and from its logits to their next tokens."""
