"""Blend inside other engines: what a client sends them, and the connectors that run there."""
