"""From the ingress to a rank: connections, places, and which one takes a request."""
