"""The gRPC service of blend, and its client."""
