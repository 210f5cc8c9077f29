"""Expert weights that workers gather from each other."""
