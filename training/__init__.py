"""What trained the models that come with the package. It is not shipped in the wheel."""
