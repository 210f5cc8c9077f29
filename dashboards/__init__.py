"""Grafana dashboards, generated from the table of metrics."""
