"""The identity of a run, saved beside its checkpoint, so that a folder never continues another run."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun import pretrained
from forerun.core.errors import ConfigError
from forerun.models.files.open import Checkpoint, resolve
from forerun_lab.overwrite import refuse_models
from forerun_lab.train.config import RunConfig
from forerun_lab.train.corpus import describe

RECORD = "run.json"
MAY_CHANGE = ("tokens", "lr", "matrix_lr", "decay_share", "eval_tokens", "threads")
"""Options that may change when a run continues: its length, learning rates, evaluations and threads."""


def target_folder(target: Path | None) -> Path:
    """The folder of a target's checkpoint; None means the bundled one. Raises ModelError."""
    return resolve(target) if target else pretrained.path("target")


def digest(parts: Iterable[str | Tensor]) -> str:
    """A hash, 16 hexadecimal digits, of texts or of vectors of token ids."""
    result = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "replace") if isinstance(part, str) else part.numpy().tobytes()
        result.update(len(data).to_bytes(8, "big") + data)
    return result.hexdigest()[:16]


def claim(config: RunConfig, method: str, data: Iterable[str | Tensor], target: Path | None = None) -> None:
    """Save the identity of the run in ``config.out``: ``method``, ``data`` and, if it has one, the checkpoint in the
    folder ``target``. A run that starts over removes an earlier run's files. Raises ConfigError if the folder has
    another run that would be continued, or a model of others."""
    refuse_models(config.out, *([] if target is None else [target]))
    folder = config.out / "run"
    own = _marks(config, method, data, target)
    if config.resume and folder.is_dir() and any(folder.iterdir()):
        _compare(config.out, _read(folder / RECORD), own)
    else:
        _forget(folder, keep=getattr(config, "generated", None))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")


def _marks(config: RunConfig, method: str, data: Iterable[str | Tensor], target: Path | None) -> dict[str, list[str]]:
    """Every property that must not change: as it is shown, and as it is compared."""
    result = {"method": [method, method]}
    if target is not None:
        result["target"] = [
            str(getattr(config, "target", None) or "forerun:target"),
            Checkpoint.at(target).fingerprint(),
        ]
    for key, value in config.recipe().items():
        if key not in MAY_CHANGE:
            given = getattr(config, key)
            mark = _mark(given) if isinstance(given, (Path, tuple)) else json.dumps(value, sort_keys=True)
            result[key] = [str(value), mark]
    return {**result, "corpus": [describe(config.corpus), digest(data)]}


def _mark(value: Any) -> str:
    """A hash of a path's content; a checkpoint may move."""
    if isinstance(value, tuple):
        return " ".join(map(_mark, value))
    if isinstance(value, Path):
        return (
            hashlib.sha256(value.read_bytes()).hexdigest()[:16]
            if value.is_file()
            else Checkpoint.open(value).fingerprint()
        )
    return str(value)


def _read(path: Path) -> Mapping[str, list[str]]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): [str(shown), str(mark)] for name, (shown, mark) in result.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{path.parent} does not say what it trains ({path.name}: {error}); name another --out, or start over with "
            "--no-resume"
        ) from error


def _compare(out: Path, saved: Mapping[str, list[str]], own: Mapping[str, list[str]]) -> None:
    for name in dict.fromkeys([*own, *saved]):
        old, new = saved.get(name, ["none", ""]), own.get(name, ["none", ""])
        if old[1] != new[1]:
            marks = name in ("target", "corpus") or old[0] == new[0]
            before, now = (f"{shown} ({mark})" if marks else shown for shown, mark in (old, new))
            raise ConfigError(
                f"{out} holds a run with another {name}: {before}, not {now}; name another --out, or start over with "
                "--no-resume"
            )


def _forget(folder: Path, keep: Path | None) -> None:
    """Remove the files that a run would continue from, except for text that the new one reads."""
    for path in [*folder.glob("**/checkpoint.pt"), folder / "generated.pt"]:
        if keep is None or path.resolve() != keep.resolve():
            path.unlink(missing_ok=True)
    for name in ("tokenizer", "generated"):
        shutil.rmtree(folder / name, ignore_errors=True)
