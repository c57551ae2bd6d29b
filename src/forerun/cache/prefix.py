"""Prefix caching: a radix tree over committed tokens, one page of tokens per edge, for target and draft alike.

A new sequence starts on the pages of the longest prefix that an earlier one has computed. Only committed tokens
enter the tree, drafts never do, so rolling back a draft cannot touch it. Pages that no sequence uses stay until the
pool runs short; then the least recently used go first. What a decoder computes depends on the source that it reads as
well: each source has a root of its own.

Where layers keep a state (``cache/states.py``), a sequence starts where one was kept, at or before the end of the pages
that are known, and computes the rest. States are kept behind a prompt's last full page and at doubling distances before
it, every ``interval`` tokens of it, where it left a known prefix, and where a sequence ended. So whoever shares all but
a prompt's end computes hardly more than is his own. There is a number of slots for them: the least recently used state
goes first, whatever happens to pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from forerun.cache.pool import Pages


class _Node:
    """A page: the tokens it covers, behind those of its ancestors. It is full, unless a sequence with a state ended in
    it; then nothing is behind it."""

    __slots__ = ("children", "depth", "page", "parent", "states", "tokens")

    def __init__(self, parent: _Node | None, run: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.tokens = run
        self.page = page
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.children: dict[tuple[int, ...], _Node] = {}
        self.states: dict[int, int] = {}
        """Slots of kept states, by how many of the page's tokens they cover."""


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
        self.lru: OrderedDict[_Node, None] = OrderedDict()
        self.last_nodes: dict[int, _Node] = {}
        self.states: OrderedDict[int, tuple[_Node, int]] = OrderedDict()
        """Where the state in a slot belongs: a page, and how many of its tokens. Least recently used first."""
        self.matched: dict[int, int] = {}
        """How many tokens of a sequence were in known pages when it came, where no state was kept so far."""
        self.listener: Listener | None = None
        pool.prefix_tree = self

    def match_prefix(
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
        node = self._known(tokens, limit, source)
        if node is None:
            return 0
        length = node.depth * self.pages.page_size
        rest = tokens[length : min(length + self.pages.page_size, limit)]
        if self.pages.states is not None:
            return self._resume(key, node, rest, partial=partial)
        last, longest = self._inside(node, rest) if partial else (None, 0)
        self._adopt(key, node, last, length + longest)
        return length + longest

    def match_length(self, tokens: Sequence[int], limit: int, source: tuple[int, ...] | None = None) -> int:
        """At how many of ``tokens[:limit]`` under ``source`` a sequence could start in whole known pages."""
        node = self._known(tokens, limit, source)
        while node is not None and self.pages.states is not None and len(node.tokens) not in node.states:
            node = node.parent
        return 0 if node is None else node.depth * self.pages.page_size

    def _known(self, tokens: Sequence[int], limit: int, source: tuple[int, ...] | None) -> _Node | None:
        """The last of the full pages that ``tokens[:limit]`` begin with, or the source's root, if there is one."""
        size, node, length = self.pages.page_size, self.roots.get(source), 0
        while node is not None and length + size <= limit:
            child = node.children.get(tuple(tokens[length : length + size]))
            if child is None:
                break
            node, length = child, length + size
        return node

    def _adopt(self, key: int, node: _Node, inside: _Node | None, length: int) -> None:
        """Put ``key`` on the pages up to ``node`` and on a part of the next one."""
        if node.parent is not None:
            self.last_nodes[key] = node
            self._touch(node)
        if inside is not None:
            self._touch(inside)
        pages, last = [], inside or node
        while last.parent is not None:
            pages.append(last.page)
            last = last.parent
        if pages:
            self.pages.adopt(key, pages[::-1], length)

    def _resume(self, key: int, known: _Node, rest: Sequence[int], *, partial: bool) -> int:
        """``start`` where there are states: at the nearest one before the end of the known pages."""
        states, size = self.pages.states, self.pages.page_size
        assert states is not None
        node, offset = known, 0
        if partial:
            inside = [(max(fitting), child) for child in known.children.values() if (fitting := _covered(child, rest))]
            offset, node = max(inside, key=lambda found: found[0], default=(0, known))
        while not offset and node.parent is not None:
            offset = max((offset for offset in node.states if partial or offset == size), default=0)
            node = node if offset else node.parent
        length = (node.depth - 1) * size + offset if offset else 0
        if length < known.depth * size:
            self.matched[key] = known.depth * size
        if not offset:
            return 0
        slot = node.states[offset]
        self.states.move_to_end(slot)
        parent = node.parent
        assert parent is not None
        whole = offset == size
        self._adopt(key, node if whole else parent, None if whole else node, length)
        states.start_from(key, slot, length)
        return length

    @staticmethod
    def _inside(node: _Node, rest: Sequence[int]) -> tuple[_Node | None, int]:
        """The child that shares the most leading tokens with ``rest``, and how many."""
        shared = [(_common(run, rest), child) for run, child in node.children.items() if rest and run[0] == rest[0]]
        longest, child = max(shared, key=lambda found: found[0], default=(0, None))
        return child, longest

    def insert(self, key: int, tokens: Sequence[int], limit: int, *, source: tuple[int, ...] | None = None) -> None:
        """Enter the full pages of what ``key`` has cached of ``tokens[:limit]``, its committed ones, and the states
        that were kept of it on the way."""
        size = self.pages.page_size
        length = min(self.pages.length(key), limit)
        node = self._end(key, length)
        if ((node.depth if node is not None else 0) + 1) * size <= length:
            node = self._enter(
                key, node or self.roots.setdefault(source, _Node(None, source or (), -1)), tokens, length
            )
        if self.pages.states is None:
            return
        for position, slot in self.pages.states.pop_stored(key):
            page = node
            while page is not None and page.depth * size > position:
                page = page.parent
            self._attach(page, size, slot)

    def _enter(self, key: int, node: _Node, tokens: Sequence[int], length: int) -> _Node:
        """Enter the full pages up to ``length`` behind ``node``; returns the last one's."""
        size, table = self.pages.page_size, self.pages.block_tables[key]
        fresh = []
        while (node.depth + 1) * size <= length:
            index = node.depth
            run = tuple(tokens[index * size : (index + 1) * size])
            child = node.children.get(run)
            if child is None:
                child = self._add(node, run, table[index])
                fresh.append(child)
            elif child.page != table[index]:
                self.pages.replace(key, index, child.page)
            node = child
        self.last_nodes[key] = node
        self._touch(node)
        if fresh and self.listener is not None:
            self.listener.stored(fresh)
        return node

    def _add(self, parent: _Node, run: tuple[int, ...], page: int) -> _Node:
        child = _Node(parent, run, page)
        self.pages.cache_page(page)
        self.lru[child] = None
        for other in list(parent.children.values()) if self.pages.states is not None else ():
            if other.tokens == run[: len(other.tokens)]:  # a sequence ended in this page
                for offset, slot in other.states.items():
                    child.states[offset] = slot
                    self.states[slot] = child, offset
                other.states.clear()
                self._remove(other)
        parent.children[run] = child
        return child

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        for slot in list(node.states.values()):
            self._lose(slot)
        del self.lru[node]
        del parent.children[node.tokens]
        if parent.parent is None and parent is not self.root and not parent.children:
            del self.roots[parent.tokens]
        self.pages.uncache_page(node.page)

    def keep_states(self, key: int, end: int, total: int) -> None:
        """Have the states kept that a forward up to entry ``end`` of a prompt of ``total`` tokens passes: those that
        another sequence is likely to start from. One prompt gets a quarter of the room at most."""
        if self.pages.states is None or not self.pages.states.max_kept:
            return
        begin = self.pages.length(key)
        for position in self._worth(key, total):
            if begin < position <= end:
                slot = self._room()
                if slot is not None:
                    self.pages.states.store_at(key, position, slot)

    def _worth(self, key: int, total: int) -> list[int]:
        """Behind which of a prompt's ``total`` tokens a state is kept, ascending."""
        size, states = self.pages.page_size, self.pages.states
        assert states is not None
        interval = max(size, states.interval // size * size)
        interval *= max(1, -(-4 * total // (interval * states.max_kept)))
        last = (total - 1) // size * size
        before = [last - (size << step) for step in range(states.max_kept // 8) if size << step < interval]
        positions = {self.matched.get(key, 0), last, *before, *range(interval, total, interval)}
        return sorted(position for position in positions if position > 0)

    def next_start(self, key: int, total: int, computed: int, known: int) -> int:
        """Up to which of its tokens ``key``, who reads a prompt of ``total`` and has ``computed`` so many, has to come
        before others can start behind more than ``known`` of them. 0: nothing is to be waited for."""
        size, states = self.pages.page_size, self.pages.states
        if states is None:
            position = (known // size + 1) * size
            return position if computed < position else 0
        worth = self._worth(key, total) if states.max_kept else []
        return next((position for position in worth if position > max(known, computed)), 0)

    def insert_finished(
        self, key: int, tokens: Sequence[int], limit: int, *, source: tuple[int, ...] | None = None
    ) -> None:
        """``commit`` for a sequence that goes: its state is kept."""
        self.insert(key, tokens, limit, source=source)
        states, size, node = self.pages.states, self.pages.page_size, self.last_nodes.get(key)
        if states is None or node is None or not states.max_kept:
            return
        position = states.lengths.get(key, 0)
        if not size <= position <= min(limit, self.pages.length(key)):
            return
        index = (position - 1) // size
        offset = position - index * size
        while node.depth > index + 1 and node.parent is not None:
            node = node.parent
        if node.depth == index:  # the page is not full
            run = tuple(tokens[index * size : position])
            child = next((child for child in node.children.values() if child.tokens[:offset] == run), None)
            node = child or self._add(node, run, self.pages.block_tables[key][index])
        self._touch(node)
        if offset in node.states:
            self.states.move_to_end(node.states[offset])
            return
        self._make_room()
        slot = states.keep_own(key)
        if slot is not None:
            self._attach(node, offset, slot)

    def _attach(self, node: _Node | None, offset: int, slot: int) -> None:
        """The state in ``slot`` is that behind ``offset`` of the page's tokens."""
        assert self.pages.states is not None
        if node is None or node.parent is None or offset in node.states:
            self.pages.states.free_kept(slot)
        else:
            node.states[offset] = slot
            self.states[slot] = node, offset

    def _room(self) -> int | None:
        """A slot for a state; None: all are about to be filled."""
        assert self.pages.states is not None
        self._make_room()
        return self.pages.states.allocate_kept()

    def _make_room(self) -> None:
        """If there is none, the least recently used state goes."""
        states = self.pages.states
        if states is not None and len(states.kept) >= states.max_kept and self.states:
            self._lose(next(iter(self.states)))

    def _lose(self, slot: int) -> None:
        assert self.pages.states is not None
        node, offset = self.states.pop(slot)
        del node.states[offset]
        self.pages.states.free_kept(slot)

    def evict_states(self) -> None:
        """Lose every kept state."""
        for slot in list(self.states):
            self._lose(slot)

    def _end(self, key: int, length: int) -> _Node | None:
        """Where ``key`` got to in the tree; None: to its root, or it has taken entries back since."""
        node = self.last_nodes.get(key)
        if node is None:
            return None
        table = self.pages.block_tables.get(key, [])
        if node.depth * self.pages.page_size > length or table[node.depth - 1] != node.page:
            return None
        return node

    def _touch(self, node: _Node) -> None:
        while node.parent is not None:
            self.lru.move_to_end(node)
            node = node.parent

    def evict(self, count: int) -> None:
        """Drop the ``count`` least recently used pages that no sequence holds, or as many as there are."""
        unused = (node for node in self.lru if self.pages.ref_counts[node.page] == 1)
        gone = [node for node, _ in zip(unused, range(count))]
        for node in gone:
            self._remove(node)
        if gone and self.listener is not None:
            self.listener.removed(gone)

    def forget(self, key: int) -> None:
        """A sequence gave up its pages."""
        self.last_nodes.pop(key, None)
        self.matched.pop(key, None)

    def check(self) -> None:
        """Raise AssertionError unless kept states are where they are said to be."""
        if any(node.states.get(offset) != slot for slot, (node, offset) in self.states.items()):
            raise AssertionError("a page does not know of its state")
        states = self.pages.states
        marked = {slot for marks in (states.to_store if states is not None else {}).values() for slot in marks.values()}
        if states is not None and states.kept != marked | {*self.states}:
            raise AssertionError("a kept state belongs to nobody")

    def clear(self) -> None:
        """Drop every page that no sequence holds."""
        self.evict(len(self.lru))


def _common(run: Sequence[int], rest: Sequence[int]) -> int:
    """How many leading tokens both have."""
    return next((i for i, (ours, theirs) in enumerate(zip(run, rest)) if ours != theirs), min(len(run), len(rest)))


def _covered(node: _Node, rest: Sequence[int]) -> list[int]:
    """Those of a page's states that ``rest`` begins with."""
    shared = _common(node.tokens, rest) if node.states else 0
    return [offset for offset in node.states if offset <= shared]
