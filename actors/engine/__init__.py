"""The executors: a batch's tasks, in the order of its plan."""
