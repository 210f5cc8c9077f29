"""Where routed experts are computed: dispatch, server, and what supplies their weights."""
