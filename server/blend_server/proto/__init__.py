"""The protocol: ``blend/v1/blend.proto`` and the code that ``scripts/proto`` generates from it."""
