"""Certificates for tests: authorities, and what they sign."""

from __future__ import annotations

import ipaddress
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """Signs certificates, and writes them to a directory with their keys."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._count = 0
        made = self._builder(name, self._key.public_key(), 1)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.path = directory / f"{name}.pem"
        self.path.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *names: str, days: int = 1) -> tuple[Path, Path]:
        """A certificate of that common name, for those DNS names, and its key; for 127.0.0.1 in any case."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(name, key.public_key(), days)
        if names:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            alternatives = x509.SubjectAlternativeName([*map(x509.DNSName, names), address])
            builder = builder.add_extension(alternatives, critical=False)
        self._count += 1
        stem = self.directory / f"{self.name}-{name}-{self._count}"
        certificate, secret = stem.with_suffix(".crt"), stem.with_suffix(".key")
        certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        secret.touch(mode=0o600)
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, secret

    def _builder(self, name: str, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
        now = datetime.now(timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self.name))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now + days * DAY)
        )
