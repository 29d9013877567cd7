"""The Prometheus endpoint and its metrics."""
