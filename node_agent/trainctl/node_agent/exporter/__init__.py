"""What Prometheus is told of an agent: its metrics, and the endpoint that serves them."""
