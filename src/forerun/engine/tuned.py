"""What ``forerun tune`` found for a model: a folder with ``tuned.json`` and the weights that it names.

``tuned.json`` says for which weights it was made, by their fingerprint, and is sealed: a hash over itself and the files
that it names. So it is never used for another model, and never after somebody has changed a part of it. The seal has no
key: whoever writes a folder can seal it, so that it names no place to write, and nothing outside itself but a draft
model, of which it has the fingerprint.
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
from forerun.models.checkpoint import read_object
from forerun.models.inventory import here, known_draft
from forerun.models.open import fingerprint, resolve
from forerun.speculate.names import KEYS

FILE = "tuned.json"
FORMAT = "forerun_tuned"
VERSION = 1
FIELDS = {"target": str, "fingerprint": str, "speculative_config": dict, "files": list, "seal": str}
READ = ("model", "datastore", "table_file", "exit_head")
"""Keys of ``speculative_config`` that name files and folders to read."""
WRITTEN = ("adapt_save", "save")
"""And those, of ``adapt`` too, that name places to write."""


def save(
    folder: Path,
    target: str,
    speculative_config: Mapping[str, Any],
    files: list[str],
    *,
    draft: str | None = None,
    **figures: Any,
) -> None:
    """Writes ``tuned.json`` for the checkpoint ``target``. Where ``speculative_config`` says ``model``, that is
    ``draft``, a model of this machine, or a folder inside ``folder``; ``files`` are those it needs, from there.
    ``figures`` are kept beside them."""
    content = {
        FORMAT: VERSION,
        "target": target,
        "fingerprint": fingerprint(resolve(target)),
        "speculative_config": dict(speculative_config),
        "files": files,
        **({} if draft is None else {"draft": {"model": draft, "fingerprint": fingerprint(here(draft))}}),
        **figures,
    }
    content["seal"] = _seal(folder, content)
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(tuned: str | Path | bool, model: str, lora: Sequence[str] | str | None = None) -> dict[str, Any]:
    """The ``speculative_config`` of a tuned folder for ``model`` with such adapters; True: the one bundled for it.

    Raises ConfigError for a folder that was made for another model, or whose parts are not those that were written."""
    if tuned is True and not has_bundled(model):
        raise ConfigError(
            f"nothing tuned for {model} comes with forerun: make it with forerun tune {model} --out FOLDER"
        )
    folder = Path(pretrained.__file__).parent / model if tuned is True else expanded(str(tuned))
    if not (folder / FILE).is_file():
        raise ConfigError(f"{folder} is no tuned folder: it has no {FILE}; forerun tune MODEL --out FOLDER makes one")
    try:
        content = read_object(folder / FILE)
    except ModelError as error:
        raise ConfigError(f"{folder} is no tuned folder: {error}") from error
    if content.get(FORMAT) != VERSION:
        raise ConfigError(f"{folder / FILE} is not of version {VERSION}: make it anew with forerun tune")
    for name, kind in FIELDS.items():
        if not isinstance(content.get(name), kind):
            raise ConfigError(f"{folder / FILE} lacks {name}: make it anew with forerun tune")
    if content["seal"] != _seal(folder, content):
        raise ConfigError(
            f"{folder}: {FILE} or a file that it names was changed after forerun tune wrote it; make it anew"
        )
    result = fingerprint(resolve(model), lora)
    if content["fingerprint"] != result:
        raise ConfigError(
            f"{folder} was tuned for {content['target']} (fingerprint {content['fingerprint']}), and the weights of "
            f"{model} are others ({result}): tune it for them"
        )
    return placed(content["speculative_config"], folder, _draft(content, folder, model))


def _draft(content: Mapping[str, Any], folder: Path, model: str) -> dict[str, str]:
    """The draft outside of ``folder`` that it was made with, by its name there: where that says, or the known draft of
    ``model``. It is only read, and never another one. Raises ConfigError where it is not here."""
    said = content.get("draft")
    if said is None:
        return {}
    if not isinstance(said, Mapping) or not all(isinstance(said.get(key), str) for key in ("model", "fingerprint")):
        raise ConfigError(f"{folder / FILE} has a draft without a name: make it anew with forerun tune")
    name = said["model"]
    if json.dumps(name) not in json.dumps(content["speculative_config"]):
        return {}  # it did not pay
    try:
        path = here(name)
    except ModelError as error:
        known = known_draft(model)
        if known is None:
            raise ConfigError(f"{folder} was tuned with the draft {shown(name)}: {one_line(error)}") from error
        path = known
    result = fingerprint(path)
    if result != said["fingerprint"]:
        raise ConfigError(
            f"{folder} was tuned with the draft {shown(name)} (fingerprint {said['fingerprint']}), and {path} is "
            f"another ({result}): tune it anew"
        )
    return {name: str(path)}


def has_bundled(model: str) -> bool:
    """Whether a tuned folder for a model of this name comes with the package."""
    return (Path(pretrained.__file__).parent / model / FILE).is_file() if model.isidentifier() else False


def placed(config: Any, folder: Path, drafts: Mapping[str, str] = MappingProxyType({})) -> Any:
    """A ``speculative_config`` that was read in ``folder``, with the folders and files that it names made absolute, in
    drafters inside drafters too; a ``model`` that is a key of ``drafts`` is its value. Raises ConfigError where it
    names a place to write, something outside the folder, or a drafter of another package, whose keys may be anything.
    """
    if isinstance(config, list):
        return [placed(item, folder, drafts) for item in config]
    if not isinstance(config, Mapping):
        return config
    if config.get("method", "none") not in (*KEYS, "none"):
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
    """A file or folder of ``folder``, all of whose parts are really there. Raises ConfigError for any other."""
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
