"""Requests that are also run at full prefill, later: which ones, how close they were, and what follows from that."""
