"""What an operator sees of the service: metrics, traces and logs."""
