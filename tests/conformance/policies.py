"""Length policies that no user would want."""

from forerun.speculate.length.base import LengthPolicy


class Off(LengthPolicy):
    """Never drafts."""

    name = "off"

    def budgets(self, sequences):
        return [0] * len(sequences)

    def observe(self, sequences, drafts, verdicts, seconds):
        pass


class Restless(Off):
    """Every budget there is, in an order that differs between sequences: none, the full one, something between."""

    name = "restless"

    def budgets(self, sequences):
        return [self._budget(sequence, self.longest(sequence)) for sequence in sequences]

    @staticmethod
    def _budget(sequence, most):
        count = len(sequence.tokens)
        return (7 * count + 3 * sequence.id + count // 5) % (most + 1)
