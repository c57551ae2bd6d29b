"""Models of others are not overwritten."""

from pathlib import Path

from forerun.core.errors import ConfigError
from forerun.models.files.checkpoint import CONFIG, read_object
from forerun.speculate.draft.heads.head import FORMAT


def refuse_models(out: Path, *reads: Path) -> None:
    """Raises ConfigError if a model would be saved over one that is read, or over one that is neither a head of ours
    nor begun by a training here."""
    same = out.is_dir() and any(path.exists() and out.samefile(path) for path in reads)
    foreign = (out / CONFIG).exists() and not (out / "run" / "run.json").exists()
    if same or (foreign and FORMAT not in read_object(out / CONFIG)):
        raise ConfigError(f"{out} has another model: choose another folder")
