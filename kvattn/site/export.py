"""The site as files that need no server: rendered whole, then moved into place."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kvattn
from kvattn.errors.cli_kinds import ExportTargetError
from kvattn.site.collection import Collection, collect
from kvattn.site.documents import encoded, found
from kvattn.site.openapi import openapi
from kvattn.site.pages import ASSETS, Pages
from kvattn.site.schema import json_schema

MANIFEST = "kvattn-export.json"  # what an export wrote, so that the next one may replace it

_ALLOWED = "a directory that is new, empty, or holds an export and other names"

Files = dict[str, bytes]


def export(directory: str | Path, collection: Collection | None = None) -> list[str]:
    """Writes the site to `directory`, which is made if need be; gives the paths written.

    Nothing appears there before all of it is rendered and on the disk. A new directory appears as
    a whole; in one that is there, each file is replaced at once, the index among the last, and
    what only the earlier export had is removed. Files that no export wrote, or that were changed
    since, are neither removed nor overwritten.

    Raises:
        ExportTargetError: the directory cannot be written, or such a file is in the way.
    """
    target = Path(directory)
    with _system_errors(target):
        earlier = _earlier(target)
    files = render(collection or collect())
    with _system_errors(target):
        _refuse_to_overwrite(target, files, earlier)
        if target.is_dir():
            _replace(target, files, earlier)
        else:
            _create(target, files)
    return sorted(files)


def render(collection: Collection) -> Files:
    """All files of the site by their paths, the manifest of all others last."""
    pages = Pages(collection, files=True)
    records = collection.records
    files = {f"assets/{asset.name}": asset.read_bytes() for asset in sorted(ASSETS.iterdir())}
    for record in records:
        files[f"errors/{record.id}.html"] = pages.error(record).encode()
        files[f"errors/{record.code}.html"] = pages.moved(record).encode()
        files[f"api/errors/{record.id}.json"] = encoded(record.to_dict())
    files["api/errors.json"] = encoded(found(records, 0, len(records)))
    files["schema.json"] = encoded(json_schema())
    files["openapi.json"] = encoded(openapi(files=True))
    files["index.html"] = b"".join(pages.index())
    written = {path: _digest(content) for path, content in sorted(files.items())}
    files[MANIFEST] = encoded({"kvattn": kvattn.__version__, "files": written})
    return files


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def _system_errors(target: Path) -> Iterator[None]:
    """Says in kvattn's way what the system will not do."""
    try:
        yield
    except ExportTargetError:
        raise
    except OSError as error:
        raise ExportTargetError("directory", f"{target}: {error.strerror}", _ALLOWED) from error


def _earlier(target: Path) -> dict[str, str]:
    """Paths and digests of what an export wrote here, if there was one."""
    try:
        files = json.loads((target / MANIFEST).read_text())["files"]
        return {str(path): str(digest) for path, digest in files.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"{target / MANIFEST}, which no export wrote"
        raise ExportTargetError("directory", what, _ALLOWED) from error


def _refuse_to_overwrite(target: Path, files: Files, earlier: dict[str, str]) -> None:
    in_the_way = [
        path
        for path, content in files.items()
        if path != MANIFEST
        and not _may_replace(target, path, {earlier.get(path), _digest(content)})
    ]
    if in_the_way:
        more = f" and {len(in_the_way) - 1} more" if len(in_the_way) > 1 else ""
        what = f"{target / in_the_way[0]}{more}, which no export wrote or which was changed since"
        raise ExportTargetError("directory", what, _ALLOWED)


def _may_replace(target: Path, path: str, known: set[str | None]) -> bool:
    """Whether nothing is there, or a file of its own with known content."""
    place = target / path
    for folder in [x for x in place.parents if x.is_relative_to(target) and x != target]:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            return False
    if place.is_symlink() or not place.exists():
        return not place.is_symlink()
    return place.is_file() and _digest(place.read_bytes()) in known


def _create(target: Path, files: Files) -> None:
    """The whole directory at once, where there is none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _stage(target.parent, files) as stage:
        stage.rename(target)


def _replace(target: Path, files: Files, earlier: dict[str, str]) -> None:
    """File by file, each at once; then without what only the earlier export had."""
    with _stage(target, files) as stage:
        for path in files:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (stage / path).replace(target / path)
    for path, digest in earlier.items():
        if path not in files and _may_replace(target, path, {digest}):
            (target / path).unlink(missing_ok=True)


@contextmanager
def _stage(parent: Path, files: Files) -> Iterator[Path]:
    """A directory below `parent` with all files; what is left of it goes away afterwards."""
    with tempfile.TemporaryDirectory(prefix=".kvattn-export-", dir=parent) as private:
        stage = Path(private, "site")
        for path, content in files.items():
            (stage / path).parent.mkdir(parents=True, exist_ok=True)
            (stage / path).write_bytes(content)
        yield stage
