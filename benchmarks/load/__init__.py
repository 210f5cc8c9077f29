"""The load generator of `tandem bench` (cluster/load/), straight to a rank's socket."""
