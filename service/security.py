"""API keys, security headers, and the size and type of bodies: what happens before a request is looked at."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from starlette.datastructures import Headers

from engine.errors import SettingError
from service.errors import ApiError

Role = Literal["read", "admin"]
MIN_KEY = 16  # characters
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/docs", "/openapi.json"})
ADMIN_PATHS = frozenset({"/v1/reload"})

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One API key, kept only as its SHA-256."""

    digest: bytes
    role: Role
    name: str


class Keys:
    """The API keys of a server; empty means that no key is needed."""

    def __init__(self, keys: list[Key] | None = None) -> None:
        self.keys = keys or []

    def __bool__(self) -> bool:
        return bool(self.keys)

    @classmethod
    def read(cls, path: Path | None) -> Keys:
        """Read `KEY read|admin [name]` lines; # starts a comment. Raises SettingError naming file and line, never the key."""
        if path is None:
            return cls()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise SettingError(f"--api-keys {path}: cannot be read ({getattr(e, 'strerror', None) or 'not UTF-8'})", field="api_keys") from None
        keys: list[Key] = []
        for number, line in enumerate(lines, 1):
            parts = line.split("#", 1)[0].split()
            if not parts:
                continue
            role = parts[1] if len(parts) > 1 else ""
            if role not in ("read", "admin"):
                raise SettingError(f"--api-keys {path}, line {number}: write `KEY read` or `KEY admin`, then a name if you like", field="api_keys")
            if len(parts[0]) < MIN_KEY:
                raise SettingError(f"--api-keys {path}, line {number}: a key has at least {MIN_KEY} characters", field="api_keys")
            keys.append(Key(digest(parts[0]), "admin" if role == "admin" else "read", " ".join(parts[2:]) or f"line {number}"))
        if not keys:
            raise SettingError(f"--api-keys {path}: the file holds no key", field="api_keys")
        if len({k.digest for k in keys}) < len(keys):
            raise SettingError(f"--api-keys {path}: one key is listed twice", field="api_keys")
        return cls(keys)

    def find(self, presented: str) -> Key | None:
        """The matching key. Takes the same time whichever key matches, or none: every digest is compared."""
        found: Key | None = None
        wanted = digest(presented)
        for key in self.keys:
            if hmac.compare_digest(key.digest, wanted):
                found = key
        return found


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def authorise(keys: Keys, path: str, headers: Headers, client: str | None) -> str | None:
    """The caller's name (None where no key is needed). Raises ApiError unauthorised or forbidden.

    Without keys everything is allowed but administration from another machine.
    """
    admin = path in ADMIN_PATHS
    if not keys:
        if admin and not _loopback(client):
            raise ApiError("forbidden", "Without API keys, administration is only allowed from the server's own machine.")
        return None
    if path in OPEN_PATHS or path.startswith("/page/"):
        return None
    scheme, _, token = headers.get("authorization", "").partition(" ")
    presented = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    key = keys.find(presented) if presented else None
    if key is None:
        sentence = "This API key is not known." if presented else "This server needs an API key: send Authorization: Bearer KEY or X-API-Key: KEY."
        raise ApiError("unauthorised", sentence, headers={"WWW-Authenticate": "Bearer"})
    if admin and key.role != "admin":
        raise ApiError("forbidden", f"The key {key.name!r} may read; this address needs the role admin.")
    return key.name


def _loopback(client: str | None) -> bool:
    if client is None:
        return False
    try:
        return ipaddress.ip_address(client).is_loopback
    except ValueError:
        return client in ("localhost", "testclient")
