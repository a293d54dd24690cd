"""Buckets of S3, Google Cloud Storage and Azure, by URL. Object writes are atomic.

    s3://bucket/prefix    gs://bucket/prefix    az://container/prefix

Credentials, regions and endpoints come from the same sources as for the stores' own tools (`AWS_*`, `GOOGLE_*`,
`AZURE_*`). Every request has a timeout. Requests are retried for `SKYRL_BUCKET_RETRY_S` seconds after a 5xx response, a
lost connection or a failed connection. Then an error names the store and the reason. Needs `pip install
'skyrl[buckets]'`.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from skyrl.errors import RequestError, StorageError
from skyrl.utils.slow_calls import calling

if TYPE_CHECKING:
    from obstore import PutMode

SCHEMES = ("s3", "gs", "az")
INSTALL = "pip install 'skyrl[buckets]'"
TIMEOUT_S = 180
"""Timeout of a request, in seconds. Each part of a file is one request, so a link of 50 kB/s is fast enough."""
RETRY_S = 180.0
"""Default time for retries of a failing request, in seconds; `SKYRL_BUCKET_RETRY_S` overrides it."""
PART_BYTES = 8 * 2**20
"""Size of the parts of file transfers, in bytes. Uploads that would have more than `PARTS` parts use larger parts."""
PARTS = 9_000
"""Maximum number of parts of an upload. S3 allows 10,000."""
PARTS_AT_ONCE = 4
UPLOAD_BYTES = 2**27
"""Maximum total size of the parts that are uploaded at once, in bytes, unless one part is larger."""
COPIED_BYTES = 4 * 2**30
"""Maximum size of an object that S3 copies in one request, in bytes. S3 refuses more than 5 GiB."""
SHA256 = "sha256"
"""Metadata key of an object's hash."""
SIGNED_FOR_S = 3600.0


def is_url(path: str | Path) -> bool:
    """Return True for a path with a scheme, such as s3://bucket/prefix, or a `Path` made from one."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(path)) is not None


def check_url(url: str) -> None:
    """Raise `RequestError` unless the scheme of the URL is supported and the library is installed."""
    scheme, separator, rest = url.partition("://")
    if scheme not in SCHEMES or not separator:
        raise RequestError(f"path={url}: {scheme}:// is not served; use s3://, gs://, az:// or a folder on a disk")
    if not rest.strip("/"):
        raise RequestError(f"path={url} names no bucket; write {scheme}://bucket/prefix")
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        raise RequestError(f"path={url}: buckets need obstore, which is not installed: {INSTALL}") from error


def check_path(path: str | Path) -> None:
    """Check a path with `check_url` if it is a URL."""
    if is_url(path):
        check_url(str(path))


def parts_of(size: int) -> tuple[int, int]:
    """Return (size of a part in bytes, number of parts at once) for the upload of an object.

    An upload holds these parts and the next one in memory. For objects up to 70 GiB, that is at most 40 MiB. For
    larger objects, it is at most `UPLOAD_BYTES` (or one part, if that is more) plus one part.
    """
    part = max(PART_BYTES, -(-size // PARTS))
    return part, max(1, min(PARTS_AT_ONCE, UPLOAD_BYTES // part))


class Stored(NamedTuple):
    """Metadata of an object."""

    key: str
    size: int
    e_tag: str | None
    version: str | None
    """Generation number, in stores with generations. With `e_tag`, it identifies a version of the object."""
    sha256: str | None = None
    """Hash of the content, if the object was uploaded from a file and the hash was requested."""
    modified: float = 0.0
    """Unix time of the last write in seconds, by the store's clock. Set only in listings."""

    @property
    def only_this(self) -> "PutMode":
        """Mode of a put that replaces only this version."""
        named = {"e_tag": self.e_tag, "version": self.version}
        return cast("PutMode", {name: value for name, value in named.items() if value is not None})


class PreconditionFailed(StorageError):
    """A conditional put found another object or another version."""


class ObjectStore:
    """Objects below a prefix of a bucket. Keys are relative to the prefix. All methods raise `StorageError`.

    Args:
        url: Scheme, bucket and prefix.

    Raises:
        RequestError: The URL is not supported, or obstore is not installed.
    """

    def __init__(self, url: str):
        check_url(url)
        from obstore.store import AzureStore, GCSStore, S3Store

        self.url = url.rstrip("/")
        self._retry_s = float(os.environ.get("SKYRL_BUCKET_RETRY_S") or RETRY_S)
        endpoints = (os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_ENDPOINT"))
        client: Any = {"timeout": timedelta(seconds=TIMEOUT_S), "connect_timeout": timedelta(seconds=30)}
        if any(endpoint.startswith("http://") for endpoint in endpoints):
            client["allow_http"] = True
        backoff: Any = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 2}
        retry: Any = {
            "max_retries": 1000,  # bounded by retry_timeout
            "retry_timeout": timedelta(seconds=self._retry_s),
            "backoff": backoff,
        }
        with self._failing("open", ""):
            scheme, _, rest = self.url.partition("://")
            bucket, _, prefix = rest.partition("/")
            kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
            self._store: Any = kinds[scheme](bucket, prefix=prefix or None, client_options=client, retry_config=retry)

    def put(self, key: str, data: bytes, mode: "PutMode" = "overwrite") -> Stored:
        """Write an object.

        Mode "create" raises `PreconditionFailed` if the object exists. A version as mode (`Stored.only_this`) raises
        it if the object does not have this version.
        """
        import obstore

        with self._failing("write", key):
            result = obstore.put(self._store, key, data, mode=mode, use_multipart=False)
            return Stored(key, len(data), result["e_tag"], result["version"])

    def put_file(self, key: str, path: Path, sha256: str) -> None:
        """Upload a file in parts, with its hash. `parts_of` says how much memory this takes."""
        import obstore

        size = path.stat().st_size
        with self._failing("write", key, size):
            part_bytes, at_once = parts_of(size)
            obstore.put(
                self._store,
                key,
                path,
                attributes={SHA256: sha256},
                chunk_size=part_bytes,
                max_concurrency=at_once,
            )

    def get(self, key: str) -> bytes | None:
        """Return the content of a small object; None if it does not exist."""
        import obstore

        with self._failing("read", key):
            try:
                return bytes(obstore.get(self._store, key).bytes())
            except FileNotFoundError:
                return None

    def chunks(self, key: str, size: int) -> Iterator[bytes]:
        """Yield the content of an object of known size in ranges, so that no request takes long."""
        import obstore

        for start in range(0, size, PART_BYTES):
            with self._failing("read", key, PART_BYTES):
                part = bytes(obstore.get_range(self._store, key, start=start, end=min(start + PART_BYTES, size)))
            yield part

    def get_file(self, key: str, path: Path, size: int) -> str:
        """Download an object to a file. Returns the sha256 (hex) of the content."""
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for part in self.chunks(key, size):
                digest.update(part)
                file.write(part)
        return digest.hexdigest()

    def find(self, key: str) -> Stored | None:
        """Return size, version and hash of an object; None if it does not exist."""
        import obstore

        with self._failing("read", key):
            try:
                result = obstore.get(self._store, key, options={"head": True})
            except FileNotFoundError:
                return None
            attributes: Any = result.attributes
            meta = result.meta
            return Stored(key, meta["size"], meta["e_tag"], meta["version"], attributes.get(SHA256))

    def list(self, prefix: str = "") -> list[Stored]:
        """Return all objects below a prefix, which consists of whole path components."""
        import obstore

        with self._failing("list", prefix):
            batches = obstore.list(self._store, prefix or None, chunk_size=1000)
            return [_listed(one) for batch in batches for one in batch]

    def copy(self, key: str, to: str) -> None:
        """Copy an object within the store, with its hash.

        On S3, objects of more than `COPIED_BYTES` are downloaded and uploaded in parts. This takes as much memory as
        `put_file`.
        """
        import obstore

        found = self.find(key) if self.url.startswith("s3://") else None
        with self._failing("write", to, found.size if found else 0):
            if found is None or found.size <= COPIED_BYTES:
                obstore.copy(self._store, key, to)
                return
            part_bytes, at_once = parts_of(found.size)
            attributes = None if found.sha256 is None else {SHA256: found.sha256}
            with obstore.open_writer(
                self._store, to, attributes=attributes, buffer_size=part_bytes, max_concurrency=at_once
            ) as writer:
                for part in self.chunks(key, found.size):
                    writer.write(part)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects in this order. Missing ones are ignored."""
        import obstore

        for key in keys:
            with self._failing("delete", key):
                try:
                    obstore.delete(self._store, key)
                except FileNotFoundError:
                    continue

    def sign(self, key: str, seconds: float = SIGNED_FOR_S) -> str | None:
        """Return a public URL of an object, valid for `seconds`; None if the store cannot sign URLs."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            return obstore.sign(self._store, "GET", key, timedelta(seconds=seconds))
        except (BaseError, OSError, ValueError):  # credentials that cannot sign
            return None

    @contextmanager
    def _failing(self, verb: str, key: str, nbytes: int = 0) -> Iterator[None]:
        """Context of a call that converts errors of the library, except FileNotFoundError when reading."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        where = f"{self.url}/{key}" if key else self.url
        try:
            with calling("bucket", f"{verb} {where}", nbytes):
                yield
        except (AlreadyExistsError, PreconditionError, FileExistsError) as error:
            raise PreconditionFailed(f"{where} was written by another process meanwhile") from error
        except FileNotFoundError as error:
            if verb == "read":
                raise
            raise StorageError(f"cannot {verb} {where}: {_reason(error)}; check the bucket's name") from error
        except PermissionError as error:
            raise StorageError(f"cannot {verb} {where}: {_reason(error)}; check credentials and permissions") from error
        except (BaseError, OSError, ValueError) as error:
            way_out = f"requests that fail are tried again for {self._retry_s:g} s (SKYRL_BUCKET_RETRY_S)"
            if verb == "open":
                way_out = "set what the store's own programs need in the environment"
            raise StorageError(f"cannot {verb} {where}: {_reason(error)}; {way_out}") from error


def _listed(meta: Any) -> Stored:
    modified = meta["last_modified"].timestamp()
    return Stored(meta["path"], meta["size"], meta["e_tag"], meta["version"], modified=modified)


def _reason(error: BaseException) -> str:
    """Return the store's own message from an error whose text also contains request details."""
    text = str(error).split("\n\nDebug source:")[0]
    message = re.search(r"<Message>(.*?)</Message>", text)
    lines = [line for line in (part.strip() for part in text.splitlines()) if line]
    return message[1] if message else " ".join(lines)[:300] or type(error).__name__
