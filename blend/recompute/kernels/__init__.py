"""Numeric kernels of blended prefill, each in plain torch (``reference``) and in Triton (a file of its own name).

:func:`~blend.recompute.kernels.dispatch.kernels_for` picks the version, once for a decoder. ``memory``, ``batch`` and
``stored`` describe what the kernels work on; they are made once for a request or a pass, not for each layer.
"""
