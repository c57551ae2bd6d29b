"""Ways to draft, for enumeration: each draws with ``Sketch.draw`` and never looks at a token before keeping it."""

import numpy


def along(depth, step):
    """A chain: ``step(sketch, node, index)`` gives the node behind ``node``, or None where the draft ends."""

    def program(sketch):
        node = -1
        for index in range(depth):
            if (node := step(sketch, node, index)) is None:
                return

    return program


def by_levels(depth, grow):
    """A tree: ``grow(sketch, parent, level)`` adds the children of each node of a level."""

    def program(sketch):
        parents = [-1]
        for level in range(depth):
            first = len(sketch.draft)
            for parent in parents:
                grow(sketch, parent, level)
            parents = list(range(first, len(sketch.draft)))

    return program


def draw(sketch, node, q):
    return sketch.draw(node, sketch.row(q))


def guess(sketch, node, q):
    """A point mass: the most likely token of q, whatever it is."""
    return sketch.draft.add(int(q.argmax()), node)


def siblings(sketch, parent, q, count, *, replacement):
    """Draws from one row of q."""
    row, gone = sketch.row(q), []
    for _ in range(count):
        if not replacement and numpy.count_nonzero(numpy.delete(q, gone)) == 0:
            break
        node = sketch.draw(parent, row, () if replacement else tuple(gone))
        gone.append(sketch.draft.tokens[node])


def chain(draft, depth, drafter=1):
    return along(depth, lambda sketch, node, _: draw(sketch, node, draft(sketch.path(node), drafter)))


def stopping_chain(draft, depth):
    """Stops where the kept prefix says so: lossless, since no drawn token is taken back."""

    def step(sketch, node, _):
        q = draft(sketch.path(node), 1)
        return None if node >= 0 and q.max() < 0.6 else draw(sketch, node, q)

    return along(depth, step)


def point_chain(draft, depth):
    return along(depth, lambda sketch, node, _: guess(sketch, node, draft(sketch.path(node), 1)))


def half_point_chain(draft, depth):
    """Point masses and draws in turn."""
    ways = draw, guess
    return along(depth, lambda sketch, node, index: ways[index % 2](sketch, node, draft(sketch.path(node), 1)))


def nothing(sketch):
    """No draft: a plain decode."""


def tree(draft, widths, *, replacement):
    """Children of every node of a level, drawn from one row of q."""

    def grow(sketch, parent, level):
        siblings(sketch, parent, draft(sketch.path(parent), 1), widths[level], replacement=replacement)

    return by_levels(len(widths), grow)


def uneven(draft, *, replacement):
    """A tree whose widths depend on the prefix: leaves at every depth."""

    def grow(sketch, parent, level):
        path = sketch.path(parent)
        siblings(sketch, parent, draft(path, 1), (sum(path) + len(path) + level) % 2 + 1, replacement=replacement)

    return by_levels(2, grow)


def several(draft, count, depth):
    """Chains of ``count`` drafters, each with a q of its own, in one tree: nodes merge, trials do not."""

    def program(sketch):
        for drafter in range(1, count + 1):
            chain(draft, depth, drafter)(sketch)

    return program


def model_and_guess(draft):
    """Two draws, and a point mass between them at every node: an n-gram's guess beside a model's draws."""

    def grow(sketch, parent, _):
        path = sketch.path(parent)
        draw(sketch, parent, draft(path, 1))
        guess(sketch, parent, draft(path, 2))

    return by_levels(2, grow)


def point_tree(draft, width, depth):
    """The most likely tokens of q, as point masses."""

    def grow(sketch, parent, _):
        for token in numpy.argsort(-draft(sketch.path(parent), 1))[:width]:
            sketch.draft.add(int(token), parent)

    return by_levels(depth, grow)
