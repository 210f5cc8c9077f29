"""Batches waiting sequences and turns logits into their next tokens."""
