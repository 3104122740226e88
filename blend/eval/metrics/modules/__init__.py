"""Metrics as modules for the library ``evaluate``: each directory is what ``evaluate.load`` takes."""
