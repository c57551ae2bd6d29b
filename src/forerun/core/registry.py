"""Registries of plug-ins by name. A class registers itself; other packages register through entry points."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module, metadata
from typing import Any, Generic, TypeVar

from forerun.core.errors import ConfigError, one_line

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of classes by name, filled by a decorator and by the entry-point group ``group``.

    Importing the package ``home`` registers ``names``, which are known before. A class is imported when looked up.
    ``of_lab`` are the names that forerun-lab adds.
    """

    def __init__(
        self, kind: str, group: str, home: str = "", names: Collection[str] = (), of_lab: Collection[str] = ()
    ) -> None:
        self.kind = kind
        self.group = group
        self._home = home
        self._of_lab = tuple(of_lab)  # a name may be anything, hashable or not
        self._names = frozenset(names)
        self._items: dict[str, type[T]] = {}

    @cached_property
    def _points(self) -> dict[str, metadata.EntryPoint]:
        return {point.name: point for point in metadata.entry_points(group=self.group)}

    def register(self, *names: str) -> Callable[[type[T]], type[T]]:
        def add(item: type[T]) -> type[T]:
            for name in names:
                taken = name in self._names and not item.__module__.startswith(self._home)
                if taken or self._items.get(name, item) is not item:
                    raise ConfigError(f"duplicate {self.kind} {name!r}")
                self._items[name] = item
            return item

        return add

    def remove(self, name: str) -> None:
        self._items.pop(name, None)

    @contextmanager
    def lent(self, name: str, item: type[T]) -> Iterator[None]:
        """Registers ``item`` within a block."""
        self.register(name)(item)
        try:
            yield
        finally:
            self.remove(name)

    def __getitem__(self, name: str) -> type[T]:
        if name not in self:
            if name in self._of_lab:
                raise lacks_lab(f"{self.kind} {name!r}")
            known = ", ".join(self)
            raise ConfigError(f"unknown {self.kind} {name!r}: choose one of {known}")
        if name not in self._items:
            if name in self._names:
                import_module(self._home)
            else:
                self._items[name] = self._load(self._points[name])
        return self._items[name]

    def _load(self, point: metadata.EntryPoint) -> type[T]:
        package = point.dist.name if point.dist is not None else point.value
        broken = f"{self.kind} {point.name!r} of the installed package {package} cannot be loaded"
        try:
            result: type[T] = point.load()
        except Exception as error:  # a package may raise anything; whoever asks for it is told
            raise ConfigError(f"{broken}: {one_line(error)}") from error
        if not isinstance(result, type):
            raise ConfigError(f"{broken}: {point.value} is not a class")
        return result

    def loadable(self) -> Iterator[str]:
        """Yields the names without those of broken packages."""
        for name in self:
            try:
                _ = self[name]
            except ConfigError:
                continue
            yield name

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._items or name in self._names or name in self._points)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._items, *self._names, *self._points}))


LAB = "forerun.lab"


def has_lab(name: str) -> bool:
    """Whether the distribution forerun-lab is installed and adds ``name``."""
    return bool(metadata.entry_points(group=LAB, name=name))


def from_lab(name: str, use: str) -> Any:
    """Loads the entry point ``name`` of forerun-lab. Raises ConfigError, naming ``use``, if that is not installed."""
    for point in metadata.entry_points(group=LAB, name=name):
        return point.load()
    raise lacks_lab(use)


def lacks_lab(use: str) -> ConfigError:
    return ConfigError(f"{use} is part of forerun-lab: pip install ./lab")
