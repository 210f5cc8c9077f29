"""Entry points: HTTP ingress, launch, telemetry, command line."""
