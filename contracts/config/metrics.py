"""Section `metrics`."""

from contracts.config.section import OutputFolder, Section


class MetricsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metric exporters of the processes (docs/monitoring.md)."""

    exporters: bool = True
    """Serve each process's own metrics on a free port: ranks, planner, ingresses, launcher, bulk
    jobs. The ingress's /metrics does not depend on it."""
    host: str | None = None
    """Listening address of exporters. null: 127.0.0.1, or the node's address if the Ray cluster has
    several nodes."""
    targets: OutputFolder | None = None
    """Folder, on the launcher's node, for the list of exporters that Prometheus reads
    (NAME_service_discovery.json). null: /dev/shm/tandem-metrics."""
