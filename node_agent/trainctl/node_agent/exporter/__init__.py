"""What Prometheus reads from an agent: its metrics, and the endpoint that serves them."""
