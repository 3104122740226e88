"""Numeric kernels of blended prefill. ``reference`` holds each one in plain torch."""
