"""Names for pluggable parts. A class registers itself; other packages register through entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Generic, TypeVar

from forerun.core.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A name -> class table for one kind of part, filled by a decorator and by the entry-point group ``group``."""

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._items: dict[str, type[T]] = {}
        self._searched = False

    def register(self, *names: str) -> Callable[[type[T]], type[T]]:
        def add(item: type[T]) -> type[T]:
            for name in names:
                if name in self._items and self._items[name] is not item:
                    raise ConfigError(f"two {self.kind}s are called {name!r}")
                self._items[name] = item
            return item

        return add

    def remove(self, name: str) -> None:
        self._items.pop(name, None)

    def _search(self) -> None:
        if self._searched:
            return
        self._searched = True
        for point in metadata.entry_points(group=self.group):
            if point.name not in self._items:
                try:
                    self._items[point.name] = point.load()
                except (ImportError, AttributeError) as error:
                    package = point.dist.name if point.dist is not None else point.value
                    raise ConfigError(
                        f"{self.kind} {point.name!r} of the installed package {package} cannot be loaded: {error}"
                    ) from error

    def __getitem__(self, name: str) -> type[T]:
        self._search()
        try:
            return self._items[name]
        except (KeyError, TypeError):
            known = ", ".join(self)
            raise ConfigError(f"unknown {self.kind} {name!r}: choose one of {known}") from None

    def __contains__(self, name: object) -> bool:
        self._search()
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        self._search()
        return iter(sorted(self._items))
