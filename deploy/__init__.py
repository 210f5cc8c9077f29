"""Serve and KubeRay configurations."""
