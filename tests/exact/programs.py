"""Ways to draft, for enumeration: each draws with ``Sketch.draw`` and never looks at a token before keeping it."""

import numpy


def chain(draft, depth):
    def program(sketch):
        node = -1
        for _ in range(depth):
            node = sketch.draw(node, sketch.row(draft(sketch.path(node), 1)))

    return program


def stopping_chain(draft, depth):
    """Stops where the kept prefix says so: lossless, since no drawn token is taken back."""

    def program(sketch):
        node = -1
        for _ in range(depth):
            row = draft(sketch.path(node), 1)
            if node >= 0 and row.max() < 0.6:
                return
            node = sketch.draw(node, sketch.row(row))

    return program


def point_chain(draft, depth):
    """Point masses: the most likely token of q, whatever it is."""

    def program(sketch):
        node = -1
        for _ in range(depth):
            node = sketch.draft.add(int(draft(sketch.path(node), 1).argmax()), node)

    return program


def half_point_chain(draft, depth):
    """Point masses and draws in turn."""

    def program(sketch):
        node = -1
        for index in range(depth):
            row = draft(sketch.path(node), 1)
            if index % 2:
                node = sketch.draft.add(int(row.argmax()), node)
            else:
                node = sketch.draw(node, sketch.row(row))

    return program


def nothing(sketch):
    """No draft: a plain decode."""


def tree(draft, widths, *, replacement):
    """Children of every node of a level, drawn from one row of q."""

    def program(sketch):
        level = [-1]
        for width in widths:
            first = len(sketch.draft)
            for parent in level:
                q = draft(sketch.path(parent), 1)
                row = sketch.row(q)
                gone = []
                for _ in range(width):
                    if not replacement and numpy.count_nonzero(numpy.delete(q, gone)) == 0:
                        break
                    node = sketch.draw(parent, row, () if replacement else tuple(gone))
                    gone.append(sketch.draft.tokens[node])
            level = list(range(first, len(sketch.draft)))

    return program


def uneven(draft, *, replacement):
    """A tree whose widths depend on the prefix: leaves at every depth."""

    def program(sketch):
        level = [-1]
        for depth in range(2):
            first = len(sketch.draft)
            for parent in level:
                path = sketch.path(parent)
                row = sketch.row(draft(path, 1))
                gone = []
                for _ in range((sum(path) + len(path) + depth) % 2 + 1):
                    if not replacement and numpy.count_nonzero(numpy.delete(sketch.rows[row], gone)) == 0:
                        break
                    node = sketch.draw(parent, row, () if replacement else tuple(gone))
                    gone.append(sketch.draft.tokens[node])
            level = list(range(first, len(sketch.draft)))

    return program


def several(draft, count, depth):
    """Chains of ``count`` drafters, each with a q of its own, in one tree: nodes merge, trials do not."""

    def program(sketch):
        for drafter in range(1, count + 1):
            node = -1
            for _ in range(depth):
                node = sketch.draw(node, sketch.row(draft(sketch.path(node), drafter)))

    return program


def model_and_guess(draft):
    """Two draws, and a point mass between them at every node: an n-gram's guess beside a model's draws."""

    def program(sketch):
        level = [-1]
        for _ in range(2):
            first = len(sketch.draft)
            for parent in level:
                path = sketch.path(parent)
                sketch.draw(parent, sketch.row(draft(path, 1)))
                sketch.draft.add(int(draft(path, 2).argmax()), parent)
            level = list(range(first, len(sketch.draft)))

    return program


def point_tree(draft, width, depth):
    """The most likely tokens of q, as point masses."""

    def program(sketch):
        level = [-1]
        for _ in range(depth):
            first = len(sketch.draft)
            for parent in level:
                for token in numpy.argsort(-draft(sketch.path(parent), 1))[:width]:
                    sketch.draft.add(int(token), parent)
            level = list(range(first, len(sketch.draft)))

    return program
