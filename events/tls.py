"""TLS between processes: what each side of a connection presents, and what it asks of the other."""

from __future__ import annotations

import ssl

from configs.load import ConfigError
from configs.schema import TlsConfig


def _with_certificate(context: ssl.SSLContext, tls: TlsConfig) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if tls.ca:
            context.load_verify_locations(tls.ca)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the TLS files '{tls.cert}', '{tls.key}' or '{tls.ca}' can't be used: {reason}"
        ) from error
    return context


def authority_context(ca: str) -> ssl.SSLContext:
    """For whoever dials and shows no certificate: trusts `ca` alone, checks the host's name.

    Raises ConfigError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"the TLS authority '{ca}' can't be used: {reason}") from error
    return context


def check_mutual(tls: TlsConfig | None, section: str = "link_tls") -> None:
    """Raises ConfigError for a section with which any certificate would be taken."""
    if tls is not None and not tls.ca:
        raise ConfigError(f"{section} needs a 'ca': without one any certificate would do")


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """For whoever listens; with a `ca`, only peers with a certificate of it come in.

    Raises ConfigError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if tls.ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return _with_certificate(context, tls)


def client_context(tls: TlsConfig) -> ssl.SSLContext:
    """For whoever dials: trusts `ca` alone, checks the host's name, shows its own certificate.

    Raises ConfigError.
    """
    return _with_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls)
