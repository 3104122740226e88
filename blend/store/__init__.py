"""The tiered store: keys, the object layout, and tiers that keep objects. It knows bytes and keys, never models."""

from __future__ import annotations

from blend.store.base import Lease, Tier, TierStats, Writer
from blend.store.buffers import Buffer
from blend.store.disk import DiskTier
from blend.store.factory import open_store, store_secret
from blend.store.fileio import FileIO
from blend.store.flight import SingleFlight
from blend.store.host import HostTier
from blend.store.key import Namespace, ObjectKey, conditioned_variant, content_key, tenant_tag
from blend.store.layout import LAYOUT_VERSION, Header, checksum, decode, encode, new_generation
from blend.store.loading import Loads, LoadStats
from blend.store.loadlease import LoadingLease
from blend.store.lookup import Lookup
from blend.store.namespaces import Dropped, NamespaceUsage, Usage
from blend.store.policy import Policy
from blend.store.secret import load_secret
from blend.store.stored import Stored, WriteStats
from blend.store.tenants import Quotas, Tenants, TenantUsage
from blend.store.terms import Terms
from blend.store.tiered import TieredStore

__all__ = [
    "LAYOUT_VERSION",
    "Buffer",
    "DiskTier",
    "Dropped",
    "FileIO",
    "Header",
    "HostTier",
    "Lease",
    "LoadStats",
    "LoadingLease",
    "Loads",
    "Lookup",
    "Namespace",
    "NamespaceUsage",
    "ObjectKey",
    "Policy",
    "Quotas",
    "SingleFlight",
    "Stored",
    "TenantUsage",
    "Tenants",
    "Terms",
    "Tier",
    "TierStats",
    "TieredStore",
    "Usage",
    "WriteStats",
    "Writer",
    "checksum",
    "conditioned_variant",
    "content_key",
    "decode",
    "encode",
    "load_secret",
    "new_generation",
    "open_store",
    "store_secret",
    "tenant_tag",
]
