"""Models of a Hugging Face hub, by huggingface_hub: safetensors checkpoints, and GGUF files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub as hf  # its parts are imported when they are used: they take a third of a second
from tqdm import tqdm

from forerun.core.errors import ModelError, one_line
from forerun.models.gguf import SUFFIX, shards_of

PREFIX = "hf:"
MAIN = "main"
CHECKPOINT = (".json", ".safetensors", ".model", ".txt", ".jinja")
"""Suffixes of a checkpoint's files that are downloaded: no code, no pickles."""
TEMPLATES = "additional_chat_templates"
"""The only subfolder that is downloaded."""
SAFETENSORS = ".safetensors"
PREFERRED = "Q4_K_M"
NO_MODEL = ("mmproj", "imatrix")
"""Parts of the names of GGUF files that are not language models."""
QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|B?F16|FP16|F32|FP32|MXFP4\w*))$", re.IGNORECASE)
MOST_LISTED = 20


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


def ggufs(files: Iterable[str]) -> list[list[str]]:
    """The GGUF models among files, each as its shards in order."""
    firsts = {shards_of(Path(name))[0] for name in files if name.endswith(SUFFIX)}
    return [[str(shard) for shard in shards_of(first)] for first in sorted(firsts, key=str)]


def is_checkpoint(files: Iterable[str]) -> bool:
    return any(name.endswith(SAFETENSORS) and "/" not in name for name in files)


def choose(source: ModelSource, files: Sequence[str]) -> list[str]:
    """The files to download of those in a repository: a checkpoint, or the shards of one GGUF model.

    Raises ModelError if no model fits, or several do, which it lists.
    """
    name, which, models = PREFIX + source.repository, source.which, ggufs(files)
    if which is None and is_checkpoint(files):
        return [file for file in files if file.endswith(CHECKPOINT) and Path(file).parent.name in ("", TEMPLATES)]
    if not models:
        raise ModelError(f"{name} has no GGUF file" if which else f"{name} has neither safetensors nor GGUF files")
    if which is not None and which.endswith(SUFFIX):
        fit = [each for each in models if which in each] or [
            each for each in models if which in {Path(file).name for file in each}
        ]
    else:
        usual = [each for each in models if not any(word in each[0].lower() for word in NO_MODEL)]
        fit = _of_quantization(usual, which or PREFERRED) or ([] if which else usual)
    if len(fit) == 1:
        missing = sorted(set(fit[0]) - set(files))
        if missing:
            raise ModelError(f"{name} lacks {missing[0]}, a part of the model that {Path(fit[0][0]).name} belongs to")
        return fit[0]
    offered = [each[0] for each in fit or models]
    listed = ", ".join(offered[:MOST_LISTED])
    if len(offered) > MOST_LISTED:
        listed += f" and {len(offered) - MOST_LISTED} more"
    what = f"several GGUF models that fit {which or 'no quantization'}" if fit else f"no GGUF model {which}"
    raise ModelError(f"{name} has {what}; name one, as {name}:FILE, of {listed}")


def _of_quantization(models: list[list[str]], requested: str) -> list[list[str]]:
    """Models whose names end with this quantization, or else with UD- and it."""
    for prefix in ("", "UD-"):
        fit = [each for each in models if quantization(each[0]) == prefix + requested.upper()]
        if fit:
            return fit
    return []


@lru_cache(maxsize=64)
def download(source: ModelSource, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder of a checkpoint, or the first file of a GGUF model. Cached files are not downloaded again, and the
    cache alone serves where the hub cannot be reached. Raises ModelError."""
    from huggingface_hub import errors

    name, revision = source.repository, revision or MAIN
    try:
        files, commit = _list_files(name, revision, cache)
        chosen = choose(source, files)
        paths = []
        for file in chosen:
            path = hf.try_to_load_from_cache(name, file, cache_dir=cache, revision=commit)
            if not isinstance(path, str):
                path = hf.hf_hub_download(name, file, revision=revision, cache_dir=cache, tqdm_class=Bar)
            paths.append(Path(path))
    except (errors.HTTPError, OSError, errors.HFValidationError, RuntimeError) as error:  # hf_xet raises the last one
        raise ModelError(_explained(name, revision, error)) from error
    return _model_path(paths[0], chosen[0])


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
        info = hf.HfApi().model_info(name, revision=revision, timeout=hf.constants.HF_HUB_ETAG_TIMEOUT)
        return [each.rfilename for each in info.siblings or ()], info.sha
    except (errors.HTTPError, OSError) as error:
        listed = None if isinstance(error, errors.RevisionNotFoundError) else _cached_files(name, revision, cache)
        if listed is None:
            raise
        return listed


def _cached_files(name: str, revision: str, cache: str | None) -> tuple[list[str], str] | None:
    for repository in repositories(cache):
        for each in repository.revisions:
            if repository.repo_id == name and (revision in each.refs or revision == each.commit_hash):
                return sorted(files_of(each)), each.commit_hash
    return None


def repositories(cache: str | None = None) -> list[Any]:
    """The cached models, as huggingface_hub's ``CachedRepoInfo``."""
    from huggingface_hub import errors

    try:
        result = hf.scan_cache_dir(cache or hf.constants.HF_HUB_CACHE).repos
    except errors.CacheNotFound:
        return []
    return sorted((each for each in result if each.repo_type == "model"), key=lambda each: each.repo_id)


def files_of(revision: Any) -> dict[str, Any]:
    """A revision's ``CachedFileInfo`` by path in the repository."""
    return {each.file_path.relative_to(revision.snapshot_path).as_posix(): each for each in revision.files}


def remove(source: ModelSource) -> int:
    """Remove a repository, or a GGUF model of it, from the cache. Returns the bytes freed. Raises ModelError."""
    repository = next((each for each in repositories() if each.repo_id == source.repository), None)
    if repository is None:
        raise ModelError(f"{PREFIX}{source.repository} is not in the hub's cache")
    revisions = [files_of(each) for each in repository.revisions]
    every = removed = {file for files in revisions for file in files.values()}
    if source.which is not None:
        chosen = {name for files in revisions for name in choose(source, sorted(files))}
        removed = {file for files in revisions for name, file in files.items() if name in chosen}
    if not any(file.file_name.endswith((SUFFIX, SAFETENSORS)) for file in every - removed):
        commits = (each.commit_hash for each in repository.revisions)
        plan = hf.scan_cache_dir(hf.constants.HF_HUB_CACHE).delete_revisions(*commits)
        plan.execute()
        return plan.expected_freed_size
    blobs = {file.blob_path: file.size_on_disk for file in removed}
    for file in removed:
        file.file_path.unlink(missing_ok=True)
    for blob in blobs.keys() - {file.blob_path for file in every - removed}:
        blob.unlink(missing_ok=True)
    return sum(blobs.values())


def _explained(name: str, revision: str, error: Exception) -> str:
    """What went wrong with a download, and what to do about it."""
    from huggingface_hub import errors

    model, status = PREFIX + name, getattr(getattr(error, "response", None), "status_code", None)
    token = "set HF_TOKEN, or run `hf auth login`"
    if isinstance(error, errors.HFValidationError):
        return f"{model} names no repository: {one_line(error)}"
    if isinstance(error, errors.GatedRepoError):
        return f"{model} asks for a token: accept its terms at {hf.constants.ENDPOINT}/{name}, then {token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return f"the hub {hf.constants.ENDPOINT} has no model {name}, or asks for a token: {token}"
    if isinstance(error, OSError) and error.errno:
        reason = error.strerror or one_line(error)
        return f"cannot write to {hf.constants.HF_HUB_CACHE}: {reason}; HF_HUB_CACHE names another folder"
    if hf.constants.HF_HUB_OFFLINE:
        return f"{model} is not whole in {hf.constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
    cause = error.__cause__ or error
    reason = f"HTTP {status}" if status else f"{type(cause).__name__}: {one_line(cause)}"
    return (
        f"the hub {hf.constants.ENDPOINT} cannot be reached or does not answer in time ({reason}); files of {model} "
        "that came are kept, and the next call goes on"
    )
