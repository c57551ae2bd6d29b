"""Prefix caching: a radix tree over committed tokens, one page of tokens per edge, for target and draft alike.

A new sequence starts on the pages of the longest prefix that an earlier one has computed. Only committed tokens
enter the tree, drafts never do, so rolling back a draft cannot touch it. Pages that no sequence uses stay until the
pool runs short; then the least recently used go first. What a decoder computes depends on the source that it reads as
well: each source has a root of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from forerun.cache.pool import Pages


class _Node:
    """A full page: the tokens it covers, behind those of its ancestors."""

    __slots__ = ("children", "depth", "page", "parent", "run")

    def __init__(self, parent: _Node | None, run: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.run = run
        self.page = page
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.children: dict[tuple[int, ...], _Node] = {}


class Listener(Protocol):
    """Hears what the tree gains and loses, in the engine's thread; a page's node is itself until it is removed."""

    def stored(self, nodes: Sequence[_Node]) -> None: ...

    def removed(self, nodes: Sequence[_Node]) -> None: ...


class PrefixTree:
    """The cached prefixes of one pool, which asks it for pages when it runs short.

    A sequence that holds a page of the tree holds those of all ancestors too: ``start`` hands out whole chains,
    and ``commit`` exchanges a page that the tree already has for the tree's own. So an unused page has only unused
    descendants, and every one of them can be reclaimed.
    """

    def __init__(self, pool: Pages) -> None:
        self.pages = pool
        self.root = _Node(None, (), -1)
        self.roots: dict[tuple[int, ...] | None, _Node] = {None: self.root}
        """By source."""
        # From the least to the most recently used, descendants before their ancestors.
        self.order: OrderedDict[_Node, None] = OrderedDict()
        self.ends: dict[int, _Node] = {}
        self.listener: Listener | None = None
        pool.reclaimer = self

    def start(
        self,
        key: int,
        tokens: Sequence[int],
        limit: int,
        *,
        partial: bool = True,
        source: tuple[int, ...] | None = None,
    ) -> int:
        """Put ``key``, which has no pages yet, on the longest known prefix of ``tokens[:limit]`` under ``source``;
        returns its length.

        With ``partial`` the prefix may end inside a page: the pool copies that page before it is written.
        """
        size = self.pages.page_size
        root = self.roots.get(source)
        if root is None:
            return 0
        node, length, pages = root, 0, []
        while length + size <= limit:
            child = node.children.get(tuple(tokens[length : length + size]))
            if child is None:
                break
            node, length = child, length + size
            pages.append(child.page)
        if node is not root:
            self.ends[key] = node
            self._touch(node)
        if partial:
            longest, inside = self._inside(node, tokens[length : min(length + size, limit)])
            if inside is not None:
                pages.append(inside.page)
                length += longest
                self._touch(inside)
        if pages:
            self.pages.adopt(key, pages, length)
        return length

    def find(self, tokens: Sequence[int], limit: int, source: tuple[int, ...] | None = None) -> int:
        """How many of ``tokens[:limit]`` under ``source`` stand in known full pages."""
        size, node, length = self.pages.page_size, self.roots.get(source), 0
        while node is not None and length + size <= limit:
            node = node.children.get(tuple(tokens[length : length + size]))
            length += size if node is not None else 0
        return length

    @staticmethod
    def _inside(node: _Node, rest: Sequence[int]) -> tuple[int, _Node | None]:
        """The child that shares the most leading tokens with ``rest``, and how many."""
        longest, best = 0, None
        if not rest:
            return longest, best
        for run, child in node.children.items():
            if run[0] == rest[0]:
                shared = next((i for i, (a, b) in enumerate(zip(run, rest)) if a != b), len(rest))
                if shared > longest:
                    longest, best = shared, child
        return longest, best

    def commit(self, key: int, tokens: Sequence[int], limit: int, *, source: tuple[int, ...] | None = None) -> None:
        """Enter the full pages of what ``key`` has cached of ``tokens[:limit]``, its committed ones."""
        size = self.pages.page_size
        length = min(self.pages.length(key), limit)
        result = self._end(key, length)
        if ((result.depth if result is not None else 0) + 1) * size > length:
            return
        node = result or self.roots.setdefault(source, _Node(None, source or (), -1))
        table = self.pages.block_tables[key]
        fresh = []
        while (node.depth + 1) * size <= length:
            index = node.depth
            run = tuple(tokens[index * size : (index + 1) * size])
            child = node.children.get(run)
            if child is None:
                child = node.children[run] = _Node(node, run, table[index])
                self.pages.hold(child.page)
                self.order[child] = None
                fresh.append(child)
            elif child.page != table[index]:
                self.pages.replace(key, index, child.page)
            node = child
        self.ends[key] = node
        self._touch(node)
        if fresh and self.listener is not None:
            self.listener.stored(fresh)

    def _end(self, key: int, length: int) -> _Node | None:
        """Where ``key`` got to in the tree; None: to its root, or it has taken entries back since."""
        node = self.ends.get(key)
        if node is None:
            return None
        table = self.pages.block_tables.get(key, [])
        if node.depth * self.pages.page_size > length or table[node.depth - 1] != node.page:
            return None
        return node

    def _touch(self, node: _Node) -> None:
        while node.parent is not None:
            self.order.move_to_end(node)
            node = node.parent

    def reclaim(self, count: int) -> None:
        """Drop the ``count`` least recently used pages that no sequence holds, or as many as there are."""
        unused = (node for node in self.order if self.pages.refs[node.page] == 1)
        gone = [node for node, _ in zip(unused, range(count))]
        for node in gone:
            parent = node.parent
            assert parent is not None
            del self.order[node]
            del parent.children[node.run]
            if parent.parent is None and parent is not self.root and not parent.children:
                del self.roots[parent.run]
            self.pages.release(node.page)
        if gone and self.listener is not None:
            self.listener.removed(gone)

    def forget(self, key: int) -> None:
        self.ends.pop(key, None)

    def clear(self) -> None:
        """Drop every page that no sequence holds."""
        self.reclaim(len(self.order))
