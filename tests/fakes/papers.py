"""Certificates for tests: one authority, and one certificate of it for 127.0.0.1."""

from __future__ import annotations

from pathlib import Path

import trustme

from configs.schema import TlsConfig


def make_papers(folder: Path) -> TlsConfig:
    """Written into a new folder; every call is an authority of its own."""
    folder.mkdir()
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    cert, key, ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
    own.cert_chain_pems[0].write_to_path(str(cert))
    own.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(ca))
    return TlsConfig(cert=str(cert), key=str(key), ca=str(ca))
