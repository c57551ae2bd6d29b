"""Folders that ``forerun tune`` writes for a model: ``tuned.json`` and the weights that it names.

``tuned.json`` has the fingerprint of the weights that it was made for, and a seal: a hash over itself and the files
that it names. So it is never used for another model, nor after a part of it was changed. The seal has no key, and
whoever writes a folder can seal it. Therefore the folder may not name a place to write, nor anything outside itself
except a draft model, of which it has the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forerun import pretrained
from forerun.core.errors import ConfigError, ModelError, one_line, shown
from forerun.core.folders import expanded
from forerun.models.files.checkpoint import read_object
from forerun.models.files.fetch import KNOWN
from forerun.models.files.inventory import here, known_draft
from forerun.models.files.open import Checkpoint
from forerun.speculate.names import KEYS, LAB_KEYS

FILE = "tuned.json"
FORMAT = "forerun_tuned"
VERSION = 1
FIELDS = {"target": str, "fingerprint": str, "speculative_config": dict, "files": list, "seal": str}
READ = ("model", "datastore", "table_file", "exit_head")
"""Keys of ``speculative_config`` that name files or folders to read."""
WRITTEN = ("adapt_save", "save")
"""Keys that name places to write; the second is one of ``adapt``."""


def save(
    folder: Path,
    target: str,
    speculative_config: Mapping[str, Any],
    files: list[str],
    *,
    draft: str | None = None,
    **figures: Any,
) -> None:
    """Writes ``tuned.json`` into ``folder``, for the checkpoint ``target``.

    Args:
        speculative_config: its ``model``, if it has one, is ``draft`` or a folder inside ``folder``.
        files: the files that it needs, relative to ``folder``.
        draft: a model on this machine.
        figures: measurements to keep in the file.
    """
    used = {} if draft is None else {"model": draft, "fingerprint": Checkpoint.at(here(draft)).fingerprint()}
    content = {
        FORMAT: VERSION,
        "target": target,
        "fingerprint": Checkpoint.open(target).fingerprint(),
        "speculative_config": dict(speculative_config),
        "files": files,
        **({"draft": used} if used else {}),
        **figures,
    }
    content["seal"] = _seal(folder, content)
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(tuned: str | Path | bool, model: str, lora: Sequence[str] | str | None = None) -> dict[str, Any]:
    """The ``speculative_config`` of the folder ``tuned``, or of the one bundled for ``model`` if it is True.

    Raises ConfigError for a folder that was made for other weights (``lora`` included), or was changed since.
    """
    folder = bundled(model) if tuned is True else expanded(str(tuned))
    if folder is None:
        raise ConfigError(f"no bundled tuning for {model}: run forerun tune {model} --out FOLDER")
    if not (folder / FILE).is_file():
        raise ConfigError(f"{folder} is not a tuned folder: it has no {FILE}; run forerun tune MODEL --out FOLDER")
    try:
        content = read_object(folder / FILE)
    except ModelError as error:
        raise ConfigError(f"{folder} is not a tuned folder: {error}") from error
    if content.get(FORMAT) != VERSION:
        raise ConfigError(f"{folder / FILE} is not version {VERSION}: run forerun tune again")
    for name, kind in FIELDS.items():
        if not isinstance(content.get(name), kind):
            raise ConfigError(f"{folder / FILE} lacks {name}: run forerun tune again")
    if content["seal"] != _seal(folder, content):
        raise ConfigError(
            f"{folder}: {FILE} or a file that it names has changed since forerun tune wrote it: run forerun tune again"
        )
    opened = Checkpoint.open(model)
    names = (None, *(KNOWN[name].file_name for name in _known_by_size(opened.path)))  # a known file may be renamed
    if all(content["fingerprint"] != opened.fingerprint(lora, name) for name in names):
        raise ConfigError(
            f"{folder} was tuned for {content['target']} (fingerprint {content['fingerprint']}), but the weights "
            f"of {model} differ ({opened.fingerprint(lora)}): run forerun tune for them"
        )
    return dict(placed(content["speculative_config"], folder, _draft(content, folder, model)))


def _draft(content: Mapping[str, Any], folder: Path, model: str) -> dict[str, str]:
    """The path of the draft model outside of ``folder``, by the name that the folder has for it.

    If that name is not on this machine, the known draft of ``model`` is taken. Raises ConfigError if neither is here
    with the fingerprint that was tuned with.
    """
    draft = content.get("draft")
    if draft is None:
        return {}
    if not isinstance(draft, Mapping) or not all(isinstance(draft.get(key), str) for key in ("model", "fingerprint")):
        raise ConfigError(f"{folder / FILE} has a draft without a name: run forerun tune again")
    name = draft["model"]
    if json.dumps(name) not in json.dumps(content["speculative_config"]):
        return {}  # it did not pay
    try:
        path = here(name)
    except ModelError as error:
        known = known_draft(model)
        if known is None:
            raise ConfigError(f"{folder} was tuned with the draft {shown(name)}: {one_line(error)}") from error
        path = known
    actual = Checkpoint.at(path).fingerprint()
    if actual != draft["fingerprint"]:
        raise ConfigError(
            f"{folder} was tuned with the draft {shown(name)} (fingerprint {draft['fingerprint']}), but {path} "
            f"differs ({actual}): run forerun tune again"
        )
    return {name: str(path)}


def bundled(model: str) -> Path | None:
    """The tuned folder that comes with the package for a model of this name, or for a file with its weights."""
    root = Path(pretrained.__file__).parent
    if model in KNOWN:
        return root / model if (root / model / FILE).is_file() else None
    try:
        path = here(model)
        for name in _known_by_size(path):
            file = root / name / FILE
            if file.is_file() and read_object(file)["fingerprint"] == Checkpoint.at(path).fingerprint(
                None, KNOWN[name].file_name
            ):
                return root / name
    except ModelError:  # loading it will report the error
        pass
    return None


def _known_by_size(path: Path) -> list[str]:
    """The known models that a file, which may be renamed, can be."""
    return [name for name, known in KNOWN.items() if path.is_file() and path.stat().st_size == known.size]


def placed(config: Any, folder: Path, drafts: Mapping[str, str] = MappingProxyType({})) -> Any:
    """A ``speculative_config`` of ``folder`` with absolute paths, also in drafters inside drafters.

    A ``model`` that is a key of ``drafts`` is replaced by its value. Raises ConfigError for a place to write, for
    anything outside the folder, and for a drafter of another package, whose keys may mean anything.
    """
    if isinstance(config, list):
        return [placed(item, folder, drafts) for item in config]
    if not isinstance(config, Mapping):
        return config
    if config.get("method", "none") not in (*KEYS, *LAB_KEYS, "none"):
        raise ConfigError(f"{folder} names the method {shown(config['method'])}, which forerun tune does not write")
    for key in WRITTEN:
        if config.get(key) is not None:
            raise ConfigError(f"{folder} names a place to write ({key}), which only you may do: it is not used")
    result = {}
    for key, value in config.items():
        if key == "model" and isinstance(value, str) and value in drafts:
            result[key] = drafts[value]
        elif key in READ and isinstance(value, str):
            result[key] = str(_inside(value, folder))
        else:
            result[key] = placed(value, folder, drafts)
    return result


def _inside(name: str, folder: Path) -> Path:
    """The path of a file or folder in ``folder``. Raises ConfigError if it, or a link within it, leads out of there."""
    try:
        target, within = (folder / name).resolve(), folder.resolve()
        if target.is_relative_to(within) and all(part.resolve().is_relative_to(within) for part in target.rglob("*")):
            return target
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{folder} names {shown(name)}, which cannot be used: {one_line(error)}") from error
    raise ConfigError(f"{folder} names {shown(name)}, which leads out of it: it is not used")


def _seal(folder: Path, content: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    plain = {key: value for key, value in content.items() if key != "seal"}
    digest.update(json.dumps(plain, sort_keys=True).encode())
    for name in content["files"]:
        path = _inside(str(name), folder)
        if not path.is_file():
            raise ConfigError(f"{folder} lacks {name!r}, which its {FILE} names")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]
