"""Snapshots of a data directory: made while a server runs, restored into a new directory."""

from blend_server.snapshots.creating import create
from blend_server.snapshots.manifest import Manifest
from blend_server.snapshots.restoring import inspect, restore

__all__ = ["Manifest", "create", "inspect", "restore"]
