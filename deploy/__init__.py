"""Configurations for Ray Serve and KubeRay."""
