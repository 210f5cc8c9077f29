"""From a checkpoint's files to the tensors of a rank."""
