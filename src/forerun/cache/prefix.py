"""Prefix caching: a radix tree over committed tokens, as in SGLang (arXiv 2312.07104); each node is a page of them.

A new sequence starts on the pages of the longest prefix that is cached. Only committed tokens enter the tree, drafts
never do. Pages that no sequence uses stay until the pool runs short; the least recently used are evicted first. In an
encoder-decoder, what the decoder computes depends on the source too: each source has a root of its own.

Where layers keep a state (``cache/states.py``), a sequence starts at a kept state, at or before the end of the cached
pages, and computes the rest. States are kept after a prompt's last full page and at doubling distances before it, every
``interval`` tokens of it, where it left a cached prefix, and where a sequence ended. So a prompt that shares all but
its end computes little more than its own part. The least recently used states are evicted first.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from forerun.cache.pool import Pages

Source = tuple[int, ...] | None


class _Node:
    """A page, and the tokens that it holds after those of its ancestors.

    It is full unless a sequence with a state ended in it; then it has no children.
    """

    __slots__ = ("children", "depth", "page", "parent", "states", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.children: dict[tuple[int, ...], _Node] = {}
        self.states: dict[int, int] = {}
        """Slots of kept states, by how many of the page's tokens they cover."""


class Listener(Protocol):
    """Hears, in the engine's thread, which pages the tree gains and loses. A page keeps its node."""

    def stored(self, nodes: Sequence[_Node]) -> None: ...

    def removed(self, nodes: Sequence[_Node]) -> None: ...


class PrefixTree:
    """The cached prefixes of one pool, which evicts from the tree when it runs short of pages.

    A sequence that holds a page of the tree holds those of all ancestors too: ``match_prefix`` hands out whole paths,
    and ``insert`` exchanges a page that the tree already has for the tree's own. So an unused page has only unused
    descendants, and every one of them can be evicted.
    """

    def __init__(self, pool: Pages) -> None:
        self.pages = pool
        self.root = _Node(None, (), -1)
        self.roots: dict[Source, _Node] = {None: self.root}
        # Least recently used first, descendants before their ancestors.
        self.lru: OrderedDict[_Node, None] = OrderedDict()
        self.last_nodes: dict[int, _Node] = {}
        """By sequence: the node of its last page in the tree."""
        self.states: OrderedDict[int, tuple[_Node, int]] = OrderedDict()
        """By slot of a kept state: its page, and how many of the page's tokens it covers. Least recently used first."""
        self.matched: dict[int, int] = {}
        """By sequence: how many of its tokens were in cached pages when it came, where no state was kept so far."""
        self.listener: Listener | None = None
        pool.prefix_tree = weakref.proxy(self)  # a cycle would keep the pool's memory

    def match_prefix(
        self, key: int, tokens: Sequence[int], limit: int, *, partial: bool = True, source: Source = None
    ) -> int:
        """Starts ``key``, which has no pages yet, on the longest cached prefix of ``tokens[:limit]`` under ``source``.

        Returns the prefix's length. With ``partial`` it may end inside a page, which is copied before it is written.
        """
        node = self._match_pages(tokens, limit, source)
        if node is None:
            return 0
        length = node.depth * self.pages.page_size
        rest = tokens[length : min(length + self.pages.page_size, limit)]
        if self.pages.states is not None:
            return self._match_state(key, node, rest, partial=partial)
        similar = [child for child in node.children.values() if partial and child.tokens[:1] == tuple(rest[:1])]
        shared = [(_common_length(child.tokens, rest), child) for child in similar]
        longest, last = max(shared, key=lambda each: each[0], default=(0, None))
        self._adopt(key, node, last, length + longest)
        return length + longest

    def match_length(self, tokens: Sequence[int], limit: int, source: Source = None) -> int:
        """How many of ``tokens[:limit]`` under ``source`` a sequence could take from whole cached pages."""
        node = self._match_pages(tokens, limit, source)
        while node is not None and self.pages.states is not None and len(node.tokens) not in node.states:
            node = node.parent
        return 0 if node is None else node.depth * self.pages.page_size

    def _match_pages(self, tokens: Sequence[int], limit: int, source: Source) -> _Node | None:
        """The last of the full pages that ``tokens[:limit]`` begin with; None: the source has no root."""
        size, node, length = self.pages.page_size, self.roots.get(source), 0
        while node is not None and length + size <= limit:
            child = node.children.get(tuple(tokens[length : length + size]))
            if child is None:
                break
            node, length = child, length + size
        return node

    def _adopt(self, key: int, node: _Node, last: _Node | None, length: int) -> None:
        """Gives ``key`` the pages up to ``node``, and ``last``, a child of which it uses a part."""
        if node.parent is not None:
            self.last_nodes[key] = node
            self._touch(node)
        if last is not None:
            self._touch(last)
        pages, each = [], last or node
        while each.parent is not None:
            pages.append(each.page)
            each = each.parent
        if pages:
            self.pages.adopt(key, pages[::-1], length)

    def _match_state(self, key: int, cached: _Node, rest: Sequence[int], *, partial: bool) -> int:
        """``match_prefix`` where there are states: starts ``key`` from the last kept one that its tokens reach."""
        states, size = self.pages.states, self.pages.page_size
        assert states is not None
        node, offset = cached, 0
        if partial:
            inside = [(max(covered), child) for child in cached.children.values() if (covered := _covered(child, rest))]
            offset, node = max(inside, key=lambda each: each[0], default=(0, cached))
        while not offset and node.parent is not None:
            offset = max((offset for offset in node.states if partial or offset == size), default=0)
            node = node if offset else node.parent
        length = (node.depth - 1) * size + offset if offset else 0
        if length < cached.depth * size:
            self.matched[key] = cached.depth * size
        if not offset:
            return 0
        slot, parent = node.states[offset], node.parent
        self.states.move_to_end(slot)
        assert parent is not None
        if offset == size:
            self._adopt(key, node, None, length)
        else:
            self._adopt(key, parent, node, length)
        states.start_from(key, slot, length)
        return length

    def insert(self, key: int, tokens: Sequence[int], limit: int, *, source: Source = None) -> None:
        """Enters the full pages of ``key``, of committed ``tokens[:limit]``, and the states stored on the way."""
        size = self.pages.page_size
        length = min(self.pages.length(key), limit)
        node = self._last_node(key, length)
        if ((node.depth if node is not None else 0) + 1) * size <= length:
            root = self.roots.setdefault(source, _Node(None, source or (), -1))
            node = self._insert_pages(key, node or root, tokens, length)
        for position, slot in self.pages.states.pop_stored(key) if self.pages.states is not None else ():
            page = node
            while page is not None and page.depth * size > position:
                page = page.parent
            self._attach(page, size, slot)

    def _insert_pages(self, key: int, node: _Node, tokens: Sequence[int], length: int) -> _Node:
        """Enters the full pages up to ``length`` below ``node``; returns the last one's node."""
        size, table = self.pages.page_size, self.pages.block_tables[key]
        new = []
        while (node.depth + 1) * size <= length:
            index = node.depth
            page_tokens = tuple(tokens[index * size : (index + 1) * size])
            child = node.children.get(page_tokens)
            if child is None:
                child = self._add(node, page_tokens, table[index])
                new.append(child)
            elif child.page != table[index]:
                self.pages.replace(key, index, child.page)
            node = child
        self.last_nodes[key] = node
        self._touch(node)
        if new and self.listener is not None:
            self.listener.stored(new)
        return node

    def _add(self, parent: _Node, tokens: tuple[int, ...], page: int) -> _Node:
        child = _Node(parent, tokens, page)
        self.pages.cache_page(page)
        self.lru[child] = None
        for other in list(parent.children.values()) if self.pages.states is not None else ():
            if other.tokens == tokens[: len(other.tokens)]:  # a sequence ended in this page
                for offset, slot in other.states.items():
                    child.states[offset] = slot
                    self.states[slot] = child, offset
                other.states.clear()
                self._remove(other)
        parent.children[tokens] = child
        return child

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        for slot in list(node.states.values()):
            self._evict_state(slot)
        del self.lru[node]
        del parent.children[node.tokens]
        if parent.parent is None and parent is not self.root and not parent.children:
            del self.roots[parent.tokens]
        self.pages.uncache_page(node.page)

    def keep_states(self, key: int, end: int, total: int) -> None:
        """Has the next forward, up to entry ``end`` of a prompt of ``total`` tokens, store the states that another
        sequence is likely to start from. One prompt gets a quarter of the slots at most."""
        states = self.pages.states
        if states is None or not states.max_kept:
            return
        begin = self.pages.length(key)
        for position in self._state_positions(key, total):
            if begin < position <= end:
                self._make_room()
                slot = states.allocate_kept()
                if slot is not None:
                    states.store_at(key, position, slot)

    def _state_positions(self, key: int, total: int) -> list[int]:
        """After which of a prompt's ``total`` tokens a state is kept, ascending."""
        size, states = self.pages.page_size, self.pages.states
        assert states is not None
        interval = max(size, states.interval // size * size)
        interval *= max(1, -(-4 * total // (interval * states.max_kept)))
        last = (total - 1) // size * size
        before = [last - (size << step) for step in range(states.max_kept // 8) if size << step < interval]
        positions = {self.matched.get(key, 0), last, *before, *range(interval, total, interval)}
        return sorted(position for position in positions if position > 0)

    def next_start(self, key: int, total: int, computed: int, cached: int) -> int:
        """How far ``key`` must get for others to be able to start after more than ``cached`` of its tokens.

        It reads a prompt of ``total`` tokens and has ``computed`` some of them. 0: waiting for it gains nothing.
        """
        size, states = self.pages.page_size, self.pages.states
        if states is None:
            position = (cached // size + 1) * size
            return position if computed < position else 0
        positions = self._state_positions(key, total) if states.max_kept else []
        return next((position for position in positions if position > max(cached, computed)), 0)

    def insert_finished(self, key: int, tokens: Sequence[int], limit: int, *, source: Source = None) -> None:
        """``insert`` for a sequence that ends, whose state is kept."""
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
            end = tuple(tokens[index * size : position])
            child = next((child for child in node.children.values() if child.tokens[:offset] == end), None)
            node = child or self._add(node, end, self.pages.block_tables[key][index])
        self._touch(node)
        if offset in node.states:
            self.states.move_to_end(node.states[offset])
            return
        self._make_room()
        slot = states.keep_own(key)
        if slot is not None:
            self._attach(node, offset, slot)

    def _attach(self, node: _Node | None, offset: int, slot: int) -> None:
        """Records that ``slot`` holds the state after ``offset`` tokens of the page."""
        assert self.pages.states is not None
        if node is None or node.parent is None or offset in node.states:
            self.pages.states.free_kept(slot)
        else:
            node.states[offset] = slot
            self.states[slot] = node, offset

    def _make_room(self) -> None:
        """Evicts the least recently used state if all slots are taken."""
        states = self.pages.states
        if states is not None and len(states.kept) >= states.max_kept and self.states:
            self._evict_state(next(iter(self.states)))

    def _evict_state(self, slot: int) -> None:
        assert self.pages.states is not None
        node, offset = self.states.pop(slot)
        del node.states[offset]
        self.pages.states.free_kept(slot)

    def evict_states(self) -> None:
        """Evicts every kept state."""
        for slot in list(self.states):
            self._evict_state(slot)

    def _last_node(self, key: int, length: int) -> _Node | None:
        """The node of the last page of ``key``; None: it has none, or was rolled back past it."""
        node = self.last_nodes.get(key)
        if node is None or node.depth * self.pages.page_size > length:
            return None
        table = self.pages.block_tables.get(key, [])
        return node if table[node.depth - 1] == node.page else None

    def _touch(self, node: _Node) -> None:
        while node.parent is not None:
            self.lru.move_to_end(node)
            node = node.parent

    def evict(self, count: int) -> None:
        """Removes the ``count`` least recently used pages that no sequence holds, or as many as there are."""
        unused = (node for node in self.lru if self.pages.ref_counts[node.page] == 1)
        evicted = [node for node, _ in zip(unused, range(count))]
        for node in evicted:
            self._remove(node)
        if evicted and self.listener is not None:
            self.listener.removed(evicted)

    def clear(self) -> None:
        """Removes every page that no sequence holds."""
        self.evict(len(self.lru))

    def forget(self, key: int) -> None:
        """Forgets a sequence that gave up its pages."""
        self.last_nodes.pop(key, None)
        self.matched.pop(key, None)

    def check(self) -> None:
        """Raises AssertionError unless every sequence and kept state is accounted for."""
        if any(node.states.get(offset) != slot for slot, (node, offset) in self.states.items()):
            raise AssertionError("a page does not know of its state")
        if not {*self.last_nodes, *self.matched} <= {*self.pages.block_tables}:
            raise AssertionError("a sequence that has no pages is remembered")
        states = self.pages.states
        if states is not None:
            pending = {slot for slots in states.to_store.values() for slot in slots.values()}
            if states.kept != pending | {*self.states}:
                raise AssertionError("a kept state belongs to nobody")


def _covered(node: _Node, rest: Sequence[int]) -> list[int]:
    """Those of a page's states whose tokens ``rest`` begins with."""
    return [offset for offset in node.states if offset <= _common_length(node.tokens, rest)]


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens both have."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
