"""Models that are cut into several GGUF files, ``NAME-00001-of-00003.gguf`` and so on: the first has the metadata, each
has tensors of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forerun.core.errors import ModelError, shown
from forerun.models.gguf import GGUFFile, GGUFTensor

NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MOST = 1000


def parts_of(path: Path) -> list[Path]:
    """Every file of the model that ``path`` belongs to, in order; by its name alone."""
    match = NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MOST:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]


def find(paths: Sequence[Path]) -> Path | None:
    """The one model that files of a folder are: its only file, or the first of its parts; None: there are several."""
    firsts = {parts_of(path)[0] for path in paths}
    return firsts.pop() if len(firsts) == 1 else None


class SplitGGUF(GGUFFile):
    """The same of several files. Raises ModelError for one that is missing, out of place, or of another
    model, and for a name that comes twice."""

    def __init__(self, path: Path) -> None:
        files = parts_of(path)
        if len(files) < 2:
            raise ModelError(f"{path} is one of several parts of a model: its name must end in -00001-of-00003.gguf, "
                             "say, and the others lie beside it")  # fmt: skip
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{path.parent} lacks {missing[0]}, a part of the model that {path.name} belongs to")
        self.path = files[0]
        self.parts = [GGUFFile(file) for file in files]
        self.metadata = {key: value for key, value in self.parts[0].metadata.items() if key != COUNT}
        self._holders: dict[str, GGUFFile] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        for number, part in enumerate(self.parts):
            self._add(number, part)
        asked = self.metadata.get(TENSORS)
        if asked is not None and asked != len(self.tensors):
            raise ModelError(f"{self.path} says that there are {shown(asked)} tensors, but its parts have "
                             f"{len(self.tensors)}")  # fmt: skip

    def _add(self, number: int, part: GGUFFile) -> None:
        says = part.metadata.get(NUMBER), part.metadata.get(COUNT)
        if says != (number, len(self.parts)):
            raise ModelError(
                f"{part.path} says that it is part {shown(says[0])} of {shown(says[1])}, counted from 0, and its name "
                f"that it is {number} of {len(self.parts)}"
            )
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                raise ModelError(f"{name} is in {self._holders[name].path.name} and in {part.path.name}")
            self.tensors[name], self._holders[name] = tensor, part

    def packed(self, name: str) -> np.ndarray:
        return self._holders[name].packed(name) if name in self._holders else super().packed(name)

    def release(self) -> None:
        for part in self.parts:
            part.release()
