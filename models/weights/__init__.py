"""Loading of a rank's tensors from a checkpoint's files."""
