"""A certificate for loopback, and TLS in front of a server that has none."""

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.kit.servers import HOST, Server


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of a certificate for loopback, and of the authority that signed it."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Self:
        folder.mkdir(parents=True, exist_ok=True)
        made = cls(folder / "ca.pem", folder / "server.pem", folder / "server.key")
        signing, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "an authority of the tests")])
        ip = x509.IPAddress(ipaddress.ip_address(HOST))
        authority = _certificate(issuer, issuer, signing, signing, [x509.BasicConstraints(ca=True, path_length=0)])
        named = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
        certificate = _certificate(named, issuer, own, signing, [x509.SubjectAlternativeName([ip])])
        made.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
        made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        made.key.write_bytes(own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
        return made

    def server_options(self, *, clients: bool) -> list[str]:
        """What a server with TLS is started with; `clients`: must they show a certificate too?"""
        shown = ["--tls-cert-file", str(self.certificate), "--tls-key-file", str(self.key)]
        return [*shown, "--tls-ca-cert-file", str(self.authority), "--tls-auth-clients", "yes" if clients else "no"]

    def context(self, *, clients: bool) -> ssl.SSLContext:
        """The same for a server in Python."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        context.verify_mode = ssl.CERT_REQUIRED if clients else ssl.CERT_NONE
        return context


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    own: ec.EllipticCurvePrivateKey,
    signing: ec.EllipticCurvePrivateKey,
    extensions: Sequence[x509.ExtensionType],
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(own.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return builder.sign(signing, hashes.SHA256())


@asynccontextmanager
async def relay(target: Callable[[], Server], context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A port that leads to whatever is the target when somebody connects, over TLS where there is a context for it."""

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            answers, requests = await asyncio.open_connection(HOST, target().port)
            with contextlib.closing(requests):
                ways = [asyncio.create_task(_pump(*way)) for way in ((reader, requests), (answers, writer))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    listener = await asyncio.start_server(join, HOST, 0, ssl=context)
    async with listener:
        yield int(listener.sockets[0].getsockname()[1])


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while chunk := await source.read(65_536):
        sink.write(chunk)
        await sink.drain()
