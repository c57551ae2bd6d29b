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
"""How the files of a checkpoint end that are downloaded: no code, no pickles."""
TEMPLATES = "additional_chat_templates"
"""The only folder of a checkpoint that is."""
SAFETENSORS = ".safetensors"
PREFERRED = "Q4_K_M"
NO_MODEL = ("mmproj", "imatrix")
"""In the names of GGUF files that are none."""
QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|B?F16|FP16|F32|FP32|MXFP4\w*))$", re.IGNORECASE)
MOST_LISTED = 20


class ModelSource(NamedTuple):
    """What ``hf:OWNER/NAME[:WHICH]`` says; ``which``: a quantization or a file of the repository."""

    repository: str
    which: str | None


class Bar(tqdm):
    """A bar per file, where standard error is a terminal. Commands switch huggingface_hub's own bars off."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **{**named, "disable": not sys.stderr.isatty(), "leave": False})


def parse(text: str) -> ModelSource:
    """Raises ModelError for a text that names no repository."""
    repository, colon, which = text.removeprefix(PREFIX).partition(":")
    if not repository or (colon and not which):
        raise ModelError(
            f"{text!r} names no model of a hub: write hf:OWNER/NAME, hf:OWNER/NAME:Q4_K_M, or a file's name"
        )
    return ModelSource(repository, which or None)


def quantization(file: str) -> str | None:
    """What the name of a GGUF file, else that of its folder, says at its end."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", Path(file).name.removesuffix(SUFFIX))
    result = QUANT.search(stem) or QUANT.search(Path(file).parent.name)
    return result[1].upper() if result else None


def ggufs(files: Iterable[str]) -> list[list[str]]:
    """The GGUF models among files, each as its files in order."""
    names = [name for name in files if name.endswith(SUFFIX)]
    firsts = sorted({str(shards_of(Path(name))[0]) for name in names})
    return [[str(part) for part in shards_of(Path(first))] for first in firsts]


def is_checkpoint(files: Iterable[str]) -> bool:
    return any(name.endswith(SAFETENSORS) and "/" not in name for name in files)


def choose(repository: ModelSource, files: Sequence[str]) -> list[str]:
    """The files to download of those that a repository has: one GGUF model first to last, or a checkpoint.

    Raises ModelError where there is none, or several that fit: they are listed."""
    where, models = PREFIX + repository.repository, ggufs(files)
    if repository.which is None and is_checkpoint(files):
        return [name for name in files if name.endswith(CHECKPOINT) and Path(name).parent.name in ("", TEMPLATES)]
    if not models:
        raise ModelError(
            f"{where} has no GGUF file" if repository.which else f"{where} has neither safetensors nor GGUF files"
        )
    if repository.which is not None and repository.which.endswith(SUFFIX):
        fit = [each for each in models if repository.which in each] or [
            each for each in models if repository.which in {Path(name).name for name in each}
        ]
    else:
        usual = [each for each in models if not any(word in each[0].lower() for word in NO_MODEL)]
        fit = _of_quantization(usual, repository.which or PREFERRED)
        if repository.which is None and not fit:
            fit = usual
    if len(fit) == 1:
        missing = sorted(set(fit[0]) - set(files))
        if missing:
            raise ModelError(f"{where} lacks {missing[0]}, a part of the model that {Path(fit[0][0]).name} belongs to")
        return fit[0]
    offered = [each[0] for each in fit or models]
    listed = ", ".join(offered[:MOST_LISTED])
    if len(offered) > MOST_LISTED:
        listed += f" and {len(offered) - MOST_LISTED} more"
    what = (
        f"several GGUF models that fit {repository.which or 'no quantization'}"
        if fit
        else f"no GGUF model {repository.which}"
    )
    raise ModelError(f"{where} has {what}; name one, as {where}:FILE, of {listed}")


def _of_quantization(models: list[list[str]], wish: str) -> list[list[str]]:
    """Those whose names end in it, from a separator on: the whole label, or behind a UD- of it."""
    result = [(quantization(each[0]) or "", each) for each in models]
    exact = [each for label, each in result if label == wish.upper()]
    return exact or [each for label, each in result if label.removeprefix("UD-") == wish.upper()]


@lru_cache(maxsize=64)
def download(repository: ModelSource, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder of a checkpoint, or the first file of a GGUF model; files that are here are not asked for again.

    Where the hub cannot be had, what the cache holds is taken. Raises ModelError."""
    from huggingface_hub import errors

    name, at = repository.repository, revision or MAIN
    try:
        files, commit = _listed(name, at, cache)
        chosen = choose(repository, files)
        result = []
        for file in chosen:
            kept = hf.try_to_load_from_cache(name, file, cache_dir=cache, revision=commit)
            if not isinstance(kept, str):
                kept = hf.hf_hub_download(name, file, revision=at, cache_dir=cache, tqdm_class=Bar)
            result.append(Path(kept))
    except (errors.HTTPError, OSError, errors.HFValidationError, RuntimeError) as error:  # hf_xet raises the last one
        raise ModelError(_explained(name, at, error)) from error
    return _place(result[0], chosen[0])


def _place(first: Path, name: str) -> Path:
    """The file of a GGUF model, or the folder that holds a checkpoint's file ``name``."""
    return first if name.endswith(SUFFIX) else first.parents[name.count("/")]


def held(repository: ModelSource) -> Path | None:
    """The same out of the cache alone; None: not there."""
    here = _cached(repository.repository, MAIN, None)
    if here is None:
        return None
    files, commit = here
    chosen = choose(repository, files)
    first = hf.try_to_load_from_cache(repository.repository, chosen[0], revision=commit)
    return _place(Path(first), chosen[0]) if isinstance(first, str) else None


def _listed(name: str, at: str, cache: str | None) -> tuple[list[str], str | None]:
    """The files of a repository and its commit, by the hub, else by the cache."""
    from huggingface_hub import errors

    try:
        info = hf.HfApi().model_info(name, revision=at, timeout=hf.constants.HF_HUB_ETAG_TIMEOUT)
        return [each.rfilename for each in info.siblings or ()], info.sha
    except (errors.HTTPError, OSError) as error:
        here = None if isinstance(error, errors.RevisionNotFoundError) else _cached(name, at, cache)
        if here is None:
            raise
        return here


def _cached(name: str, at: str, cache: str | None) -> tuple[list[str], str] | None:
    for repository in repositories(cache):
        for each in repository.revisions:
            if repository.repo_id == name and (at in each.refs or at == each.commit_hash):
                return sorted(files_of(each)), each.commit_hash
    return None


def repositories(cache: str | None = None) -> list[Any]:
    """The models of the cache, as huggingface_hub describes them."""
    from huggingface_hub import errors

    try:
        result = hf.scan_cache_dir(cache or hf.constants.HF_HUB_CACHE).repos
    except errors.CacheNotFound:
        return []
    return sorted((each for each in result if each.repo_type == "model"), key=lambda each: each.repo_id)


def files_of(revision: Any) -> dict[str, Any]:
    """What huggingface_hub says of each file, by its place in the repository."""
    return {each.file_path.relative_to(revision.snapshot_path).as_posix(): each for each in revision.files}


def remove(stored: ModelSource) -> int:
    """Take a repository, or a GGUF model of it, out of the cache; the bytes that are free then. Raises ModelError."""
    result = [each for each in repositories() if each.repo_id == stored.repository]
    if not result:
        raise ModelError(f"{PREFIX}{stored.repository} is not in the hub's cache")
    revisions = [files_of(each) for each in result[0].revisions]
    every = gone = {file for files in revisions for file in files.values()}
    if stored.which is not None:
        chosen = {name for files in revisions for name in choose(stored, sorted(files))}
        gone = {file for files in revisions for name, file in files.items() if name in chosen}
    if not any(file.file_name.endswith((SUFFIX, SAFETENSORS)) for file in every - gone):
        plan = hf.scan_cache_dir(hf.constants.HF_HUB_CACHE).delete_revisions(
            *(each.commit_hash for each in result[0].revisions)
        )
        plan.execute()
        return plan.expected_freed_size
    blobs = {file.blob_path: file.size_on_disk for file in gone}
    for file in gone:
        file.file_path.unlink(missing_ok=True)
    for blob in blobs.keys() - {file.blob_path for file in every - gone}:
        blob.unlink(missing_ok=True)
    return sum(blobs.values())


def _explained(name: str, at: str, error: Exception) -> str:
    from huggingface_hub import errors

    where, status = PREFIX + name, getattr(getattr(error, "response", None), "status_code", None)
    token = "set HF_TOKEN, or run `hf auth login`"
    if isinstance(error, errors.HFValidationError):
        return f"{where} names no repository: {one_line(error)}"
    if isinstance(error, errors.GatedRepoError):
        return f"{where} asks for a token: accept its terms at {hf.constants.ENDPOINT}/{name}, then {token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{where} has no revision {at!r}"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return f"the hub {hf.constants.ENDPOINT} has no model {name}, or asks for a token: {token}"
    if isinstance(error, OSError) and error.errno:
        reason = error.strerror or one_line(error)
        return f"cannot write to {hf.constants.HF_HUB_CACHE}: {reason}; HF_HUB_CACHE names another folder"
    if hf.constants.HF_HUB_OFFLINE:
        return f"{where} is not whole in {hf.constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
    cause = error.__cause__ or error
    reason = f"HTTP {status}" if status else f"{type(cause).__name__}: {one_line(cause)}"
    return (
        f"the hub {hf.constants.ENDPOINT} cannot be reached or does not answer in time ({reason}); files of {where} "
        "that came are kept, and the next call goes on"
    )
