"""Models of a Hugging Face hub, by huggingface_hub: safetensors checkpoints, and GGUF files."""

from __future__ import annotations

import os
import re
import stat
import sys
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub as hf  # its other parts are imported when they are used: they take a third of a second
from huggingface_hub import constants
from tqdm import tqdm

from forerun.core.errors import ModelError, one_line, shown
from forerun.models.files.checkpoint import WEIGHTS, library
from forerun.models.files.gguf import SUFFIX, first_shard, models_among, shards_of

PREFIX = "hf:"
MAIN = "main"
CHECKPOINT = (".json", ".safetensors", ".model", ".txt", ".jinja")
"""Suffixes of a checkpoint's files that are downloaded: no code, no pickles."""
TEMPLATES = "additional_chat_templates"
"""The only subfolder that is downloaded."""
SAFETENSORS = ".safetensors"
PREFERRED = "Q4_K_M"
QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|B?F16|FP16|F32|FP32|(?:MX|NV)FP4\w*))$", re.IGNORECASE)
MOST_LISTED = 20
PLAIN = re.compile(r"[A-Za-z0-9-]{1,128}")
"""ETags and commits, of which huggingface_hub makes names of files."""


class ModelSource(NamedTuple):
    """A parsed ``hf:OWNER/NAME[:WHICH]``. ``which`` is a quantization or a file of the repository."""

    repository: str
    which: str | None


class Bar(tqdm):
    """A progress bar per file, on terminals only. Commands switch huggingface_hub's own bars off."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **{**named, "disable": not sys.stderr.isatty(), "leave": False})


def parse(text: str) -> ModelSource:
    """Parse ``hf:OWNER/NAME[:WHICH]``. Raises ModelError for a text that names no repository."""
    repository, colon, which = text.removeprefix(PREFIX).partition(":")
    if not repository or (colon and not which):
        raise ModelError(
            f"{text!r} names no model of a hub: write hf:OWNER/NAME, hf:OWNER/NAME:Q4_K_M, or a file's name"
        )
    return ModelSource(repository, which or None)


def quantization(file: str) -> str | None:
    """The quantization that a GGUF file's name ends with, or else its folder's."""
    base = re.sub(r"-\d{5}-of-\d{5}$", "", Path(file).name.removesuffix(SUFFIX))
    result = QUANT.search(base) or QUANT.search(Path(file).parent.name)
    return result[1].upper() if result else None


def ggufs(files: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among files: those of its shards that are there, in order, by the name of the first one."""
    result: dict[str, list[str]] = {}
    for name in sorted(files):
        if name.endswith(SUFFIX):
            result.setdefault(first_shard(Path(name)).as_posix(), []).append(name)
    return result


def is_checkpoint(files: Iterable[str]) -> bool:
    return any(name.endswith(SAFETENSORS) and "/" not in name for name in files)


def _in_checkpoint(file: str) -> bool:
    """Whether a file of a checkpoint's repository is downloaded."""
    return file.endswith(CHECKPOINT) and Path(file).parent.name in ("", TEMPLATES)


def choose(source: ModelSource, files: Collection[str]) -> list[str]:
    """The files to download of those in a repository: a checkpoint, or the shards of one GGUF model.

    Raises ModelError if no model fits, or several do, which it lists.
    """
    if source.which is None and is_checkpoint(files):
        unused = _unused({file for file in files if file.endswith(SAFETENSORS) and "/" not in file})
        return [file for file in files if _in_checkpoint(file) and file not in unused]
    first, shards = _one_gguf(source, files)
    there = set(shards)
    missing = next((shard for shard in shards_of(Path(first)) if shard.as_posix() not in there), None)
    if missing is not None:
        name = PREFIX + source.repository
        raise ModelError(f"{name} lacks {missing}, a part of the model that {Path(first).name} belongs to")
    return shards


def _unused(weights: set[str]) -> set[str]:
    """Of a checkpoint's safetensors files, those with the same weights again, or others that are not read."""
    if WEIGHTS in weights:
        return weights - {WEIGHTS}
    original = {file for file in weights if file.startswith("consolidated")}
    return original if original < weights else set()


def _one_gguf(source: ModelSource, files: Iterable[str]) -> tuple[str, list[str]]:
    """The GGUF model that is meant, as in ``ggufs``. Raises ModelError unless there is just one."""
    name, which, models = PREFIX + source.repository, source.which, ggufs(files)
    if not models:
        raise ModelError(f"{name} has no GGUF file" if which else f"{name} has neither safetensors nor GGUF files")
    if which is not None and which.endswith(SUFFIX):
        fit = [first for first, shards in models.items() if which in shards] or [
            first for first, shards in models.items() if which in {Path(file).name for file in shards}
        ]
    else:
        usual = [first.as_posix() for first in models_among(map(Path, models))]
        fit = _of_quantization(usual, which or PREFERRED) or ([] if which else usual)
    if len(fit) == 1:
        return fit[0], models[fit[0]]
    offered = fit or list(models)
    listed = ", ".join(offered[:MOST_LISTED])
    if len(offered) > MOST_LISTED:
        listed += f" and {len(offered) - MOST_LISTED} more"
    what = f"several GGUF models that fit {which or 'no quantization'}" if fit else f"no GGUF model {which}"
    raise ModelError(f"{name} has {what}; name one, as {name}:FILE, of {listed}")


def _of_quantization(models: list[str], requested: str) -> list[str]:
    """Models whose names end with this quantization, or else with UD- and it."""
    for prefix in ("", "UD-"):
        fit = [each for each in models if quantization(each) == prefix + requested.upper()]
        if fit:
            return fit
    return []


@lru_cache(maxsize=64)
def download(source: ModelSource, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder of a checkpoint, or the first file of a GGUF model. Cached files are not downloaded again, and the
    cache alone serves where the hub cannot be reached. Raises ModelError."""
    from huggingface_hub import errors

    name, revision = source.repository, revision or MAIN
    _check_answers()
    with (
        library(f"{PREFIX}{name}: the answer of the hub {constants.ENDPOINT} cannot be used"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", "Not enough free disk space", UserWarning)
        try:
            files, commit = _list_files(name, revision, cache)
            chosen = choose(source, files)
            paths = []
            for file in chosen:
                path = hf.try_to_load_from_cache(name, file, cache_dir=cache, revision=commit)
                if not isinstance(path, str):
                    path = hf.hf_hub_download(name, file, revision=revision, cache_dir=cache, tqdm_class=Bar)
                paths.append(Path(path))
        except (errors.HTTPError, OSError, errors.HFValidationError, RuntimeError) as error:  # hf_xet raises the last
            raise ModelError(_explained(name, revision, error, cache)) from error
        except UserWarning as error:
            raise ModelError(f"{PREFIX}{name} cannot be downloaded: {one_line(error)}") from error
    return _model_path(paths[0], chosen[0])


_installing = threading.Lock()


def _check_answers() -> None:
    """Have the client of huggingface_hub check all answers, whichever factory makes that client.

    Nothing public says which factory that is. A hook of the present client alone is not enough: huggingface_hub makes
    another client after a failed connection.
    """
    from huggingface_hub.utils import _http

    with _installing:
        factory: Any = _http._GLOBAL_CLIENT_FACTORY
        if getattr(factory, "func", None) is not _checked_client:
            hf.set_client_factory(partial(_checked_client, factory))


def _checked_client(factory: Any) -> Any:
    client = factory()
    client.event_hooks["response"].append(_check_answer)
    return client


def _check_answer(response: Any) -> None:
    """Refuse an answer about a file whose headers would have huggingface_hub write elsewhere. Raises ModelError."""
    if response.request.method != "HEAD":
        return
    for header in ("X-Repo-Commit", "X-Linked-Etag", "ETag"):
        value = response.headers.get(header)
        if value is None or (header == "ETag" and response.is_error):  # pages about errors have other ETags
            continue
        if not PLAIN.fullmatch(value.lstrip("W/").strip('"') if header != "X-Repo-Commit" else value):
            raise _untrusted(f"the {header} {shown(value)}", "is not made of letters, digits and hyphens")


def _untrusted(what: str, reason: str) -> ModelError:
    return ModelError(f"the hub {constants.ENDPOINT} answers with {what}, which {reason}: it is not used")


def _model_path(file: Path, name: str) -> Path:
    """A GGUF file itself, or the folder of the checkpoint whose file ``name`` it is."""
    return file if name.endswith(SUFFIX) else file.parents[name.count("/")]


def cached(source: ModelSource) -> Path | None:
    """What ``download`` returns, from the cache alone; None: it is not there."""
    listed = _cached_files(source.repository, MAIN, None)
    if listed is None:
        return None
    files, commit = listed
    first = choose(source, files)[0]
    path = hf.try_to_load_from_cache(source.repository, first, revision=commit)
    return _model_path(Path(path), first) if isinstance(path, str) else None


def _list_files(name: str, revision: str, cache: str | None) -> tuple[list[str], str | None]:
    """The files of a repository and its commit, from the hub, or else from the cache."""
    from huggingface_hub import errors

    try:
        info = hf.HfApi().model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (errors.HTTPError, OSError) as error:
        listed = None if isinstance(error, errors.RevisionNotFoundError) else _cached_files(name, revision, cache)
        if listed is None:
            raise
        return listed
    if info.sha is not None and not PLAIN.fullmatch(info.sha):
        raise _untrusted(f"the commit {shown(info.sha)}", "is not made of letters, digits and hyphens")
    files = [each.rfilename for each in info.siblings or ()]
    for file in files:
        if (file.endswith(SUFFIX) or _in_checkpoint(file)) and not _is_inside(file):
            raise _untrusted(f"a file called {shown(file)}", "is no name inside a repository")
    return files, info.sha


def _is_inside(file: str) -> bool:
    """Whether a file's name leads to a place in the repository, on Windows too."""
    return file.isprintable() and "\\" not in file and not {"", ".", ".."} & set(file.split("/"))


def _cached_files(name: str, revision: str, cache: str | None) -> tuple[list[str], str] | None:
    for repository in repositories(cache):
        for each in repository.revisions:
            if repository.repo_id == name and each.files and (revision in each.refs or revision == each.commit_hash):
                return sorted(files_of(each)), each.commit_hash
    return None


def repositories(cache: str | None = None) -> list[Any]:
    """The cached models, as huggingface_hub's ``CachedRepoInfo``. Raises ModelError."""
    return sorted((each for each in _scan(cache).repos if each.repo_type == "model"), key=lambda each: each.repo_id)


def _scan(cache: str | None = None) -> Any:
    """All that is cached, as huggingface_hub's ``HFCacheInfo``. Raises ModelError for what is no cache."""
    from huggingface_hub import errors

    folder = cache or constants.HF_HUB_CACHE
    try:
        return hf.scan_cache_dir(folder)
    except errors.CacheNotFound:
        return hf.HFCacheInfo(size_on_disk=0, repos=frozenset(), incomplete_files=frozenset(), warnings=[])
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} cannot be read: {one_line(error)}; HF_HUB_CACHE names another folder") from error


def files_of(revision: Any) -> dict[str, Any]:
    """A revision's ``CachedFileInfo`` by path in the repository."""
    return {each.file_path.relative_to(revision.snapshot_path).as_posix(): each for each in revision.files}


def remove(source: ModelSource) -> tuple[int, set[Path]]:
    """Remove a repository from the cache, or a GGUF model of it in all revisions, and nothing that was not named.

    Returns the bytes freed, and the paths that models had. Raises ModelError.
    """
    cache, name = _scan(), PREFIX + source.repository
    found = [each for each in cache.repos if each.repo_type == "model" and each.repo_id == source.repository]
    if not found:
        raise ModelError(f"{name} is not in the hub's cache")
    folder, revisions = found[0].repo_path, [files_of(each) for each in found[0].revisions]
    for path in (folder, *folder.glob("*"), *folder.glob("snapshots/*")):
        if path.is_symlink():
            raise ModelError(f"{path} is a link to another folder: remove it and what it leads to yourself")
    names = {file for files in revisions for file in files}
    if source.which is not None:
        names = set(_one_gguf(source, names)[1])
    elif not (is_checkpoint(names) or ggufs(names) or all(map(_in_checkpoint, names))):
        raise ModelError(f"{folder} holds no model that Forerun runs: remove it with `hf cache rm {found[0].cache_id}`")
    removed = {file for files in revisions for each, file in files.items() if each in names}
    every = {file for each in cache.repos for revision in each.revisions for file in revision.files}
    kept = {path for file in every - removed for path in _hops(file.file_path)}
    if source.which is None and any(path.is_relative_to(folder) for path in kept):
        raise ModelError(f"links in other folders of {cache.cache_dir} lead to files of {folder}: remove those first")
    plan = cache.delete_files(*removed)
    blobs = {
        path for path in plan.blobs - kept if path.parent == folder / "blobs"
    }  # what links lead to elsewhere stays
    nothing_left = not set(folder.glob("blobs/*")) - blobs and all(files.keys() <= names for files in revisions)
    whole = {folder} if source.which is None or nothing_left else set()
    try:
        before = _size(cache.cache_dir)
        for path in {file.file_path for file in removed} | blobs | whole:
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(0, "permission denied", path)
        replace(plan, blobs=frozenset() if whole else frozenset(blobs), repos=frozenset(whole)).execute()
        freed = before - _size(cache.cache_dir)
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be removed: {error.strerror}") from error
    download.cache_clear()
    return freed, {file.file_path for file in removed} | {file.file_path.parent for file in removed}


def _hops(path: Path) -> Iterator[Path]:
    """A path, and what it leads to, link by link."""
    while path.is_symlink():
        yield path
        target = path.parent / path.readlink()
        path = target.parent.resolve() / target.name
    yield path


def _size(folder: Path) -> int:
    """Bytes of the files in a folder. Links are not followed, and each file counts once."""
    states = (path.lstat() for path in folder.rglob("*"))
    return sum({(each.st_dev, each.st_ino): each.st_size for each in states if stat.S_ISREG(each.st_mode)}.values())


def _explained(name: str, revision: str, error: Exception, cache: str | None) -> str:
    """What went wrong with a download, and what to do about it."""
    from huggingface_hub import errors

    model, status = PREFIX + name, getattr(getattr(error, "response", None), "status_code", None)
    token = "set HF_TOKEN, or run `hf auth login`"
    if isinstance(error, errors.HFValidationError):
        return f"{model} names no repository: {one_line(error)}"
    if isinstance(error, errors.GatedRepoError):
        return f"{model} asks for a token: accept its terms at {constants.ENDPOINT}/{name}, then {token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision!r}"
    absent = status == 404 and not isinstance(error, errors.EntryNotFoundError)  # mirrors send no code of their own
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403) or absent:
        return f"the hub {constants.ENDPOINT} has no model {name}, or asks for a token: {token}"
    if isinstance(error, OSError) and error.errno:
        reason = error.strerror or one_line(error)
        return f"cannot write to {constants.HF_HUB_CACHE}: {reason}; HF_HUB_CACHE names another folder"
    if constants.HF_HUB_OFFLINE:
        return f"{model} is not whole in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
    cause = error.__cause__ or error
    reason = f"HTTP {status}" if status else f"{type(cause).__name__}: {one_line(cause)}"
    folder = Path(cache or constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")
    kept = f"; the next call continues the download of {model}" if any(folder.glob("*")) else ""
    return f"the hub {constants.ENDPOINT} cannot be reached or does not answer in time ({reason}){kept}"
