"""Entry point of the bulk job."""
