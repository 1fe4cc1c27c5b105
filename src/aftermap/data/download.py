"""Downloads that can be interrupted: to a .part file, continued where they stopped, checked, then moved into place."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aftermap.errors import DataError, InputError
from aftermap.progress import progress

__all__ = ["fetch", "sha256_of"]

_CHUNK = 1 << 16
_ATTEMPTS = 3
_AGENT = {"User-Agent": "aftermap"}
_SCHEMES = ("https://", "http://")  # Checksums are compared, so that a plain connection can harm nobody.


def sha256_of(path: str | Path) -> str:
    """Returns the SHA-256 hash of a file, as hexadecimal digits.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "empty"
    >>> place.touch()
    >>> sha256_of(place)[:16]
    'e3b0c44298fc1c14'
    """
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(urls: Sequence[str], target: str | Path, sha256: str, *, timeout: float = 30.0) -> Path:
    """Downloads a file, unless it is there already.

    Bytes go to ``target.part``, where an interrupted download goes on if the server allows it. The file appears under
    its name only when it is whole and its checksum is right.

    Args:
        urls: The addresses of the same file, which are tried in order.
        target: The path that the file shall have; missing folders are made.
        sha256: The hash that the file must have.
        timeout: The number of seconds to wait for an answer.

    Returns:
        The path ``target``, where the file now is.

    Raises:
        InputError: An address is none of the web; a file of this machine is not read.
        DataError: No address has the file, or its checksum is wrong. What came of a broken connection stays in the
            .part file.
        OSError: The disk is full or not writable; the .part file stays.
    """
    for url in urls:
        if not url.startswith(_SCHEMES):
            raise InputError(f"urls must begin with {' or '.join(_SCHEMES)}, got {url!r}")
    place = Path(target)
    if place.is_file():
        if sha256_of(place) == sha256:
            return place
        raise DataError(
            f"{place} is there, but its checksum is not {sha256[:16]}…: it is another file. Move it away first"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(place.name + ".part")
    reasons = []
    for url in urls:
        for _ in range(_ATTEMPTS):
            try:
                _continue(url, part, timeout)
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                reasons.append(f"{url}: {error}")
                if isinstance(error, urllib.error.HTTPError):
                    break  # Asking again would give the same answer.
                continue
            if sha256_of(part) == sha256:
                part.replace(place)
                return place
            reasons.append(f"{url}: the checksum of what came is {sha256_of(part)[:16]}…, not {sha256[:16]}…")
            part.unlink()
            break
    raise DataError(f"{place.name} could not be downloaded. " + "; ".join(dict.fromkeys(reasons)))


def _continue(url: str, part: Path, timeout: float) -> None:
    """Adds to the .part file what it still lacks."""
    have = part.stat().st_size if part.exists() else 0
    headers = {**_AGENT, "Range": f"bytes={have}-"} if have else _AGENT
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 (`fetch` has judged the scheme.)
        answer = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310  # nosec B310
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # Nothing is missing.
            return
        raise
    with answer:
        resumed = answer.status == 206
        length = answer.headers.get("Content-Length")
        total = None if length is None else -(-int(length) // _CHUNK)
        written = 0
        with part.open("ab" if resumed else "wb") as stream:
            for chunk in progress(
                _chunks(answer), description=f"downloading {part.name.removesuffix('.part')}", total=total
            ):
                stream.write(chunk)
                written += len(chunk)
        if length is not None and written != int(length):
            raise http.client.IncompleteRead(b"", int(length) - written)


def _chunks(answer: Any) -> Iterator[bytes]:
    while chunk := answer.read(_CHUNK):
        yield chunk
