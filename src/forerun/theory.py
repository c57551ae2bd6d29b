"""The quantities that say when speculation pays, as pure functions.

Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023,
arXiv 2211.17192), called [L] below; section, equation and theorem numbers are that paper's.

Symbols and units, the same in every function:

- ``alpha``: probability that one drafted token is accepted, in [0, 1]; positions count as independent (section 3.1).
- ``gamma``: drafted tokens per round, an integer from 0 to 2^53; 0 is plain decoding.
- ``c``: time of one draft step over the time of one plain target step, >= 0, no unit (definition 3.7).
- ``c_hat``: arithmetic operations per token of the draft over those of the target, >= 0, no unit (definition 3.10).
- ``lenience``: l in (0, 1]; 1 is lossless (appendix A.5).
- ``p``, ``q``: target and draft distributions, after warping; the last dimension is the vocabulary, the others are a
  batch and broadcast. Tensors or nested sequences of floats; results are float64 tensors without the last dimension
  (``float()`` reads the result of a single pair).

Bad arguments raise :class:`~forerun.core.errors.ConfigError`. ``alpha = 1`` is the limit, taken exactly.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import SupportsFloat, SupportsIndex

import torch

from forerun.core.errors import ConfigError

__all__ = [
    "acceptance_rate",
    "best_gamma",
    "d_lk",
    "expected_experts",
    "expected_tokens",
    "lenient_acceptance_rate",
    "lenient_argmax_mask",
    "lenient_token_distribution",
    "operations_increase",
    "predicted_speedup",
    "walltime_improvement",
]

Distribution = torch.Tensor | Sequence[float] | Sequence[Sequence[float]]

_SUM_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}  # any other type: 1e-6
_MOST = 1 << 53


def as_number(name: str, value: SupportsFloat, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """``value`` as a finite float in [low, high], or in (low, high] with ``above``."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{name} must be one number, not {type(value).__name__}") from None
    if math.isfinite(number) and low <= number <= high and not (above and number == low):
        return number
    if high < math.inf:
        allowed = f"in {'(' if above else '['}{low:g}, {high:g}]"
    else:
        allowed = f"finite and {'>' if above else '>='} {low:g}"
    raise ConfigError(f"{name} must be {allowed}, got {number:g}")


def as_count(name: str, value: SupportsIndex, low: int = 0) -> int:
    """``value`` as an integer >= low."""
    try:
        count = operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        count = None
    if count is None or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, not {type(value).__name__}")
    if count < low:
        raise ConfigError(f"{name} must be >= {low}, got {count}")
    if count > _MOST:
        raise ConfigError(f"{name} must be at most 2^53: beyond that, floats do not count")
    return count


def as_tensor(name: str, value: Distribution | float) -> torch.Tensor:
    """``value`` as a real tensor, its type kept."""
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ConfigError(f"{name} must be a tensor or a rectangular sequence of floats") from None
    if tensor.is_complex():
        raise ConfigError(f"{name} must be real, got {tensor.dtype}")
    return tensor


def as_rows(name: str, value: Distribution) -> torch.Tensor:
    """``value`` as float64 rows over the vocabulary: no negative entry, every row sums to 1."""
    tensor = as_tensor(name, value)
    if tensor.dim() == 0:
        raise ConfigError(f"{name} must have a vocabulary dimension, got a single number")
    rows = tensor.to(torch.float64)
    plain = rows.detach()
    if not bool((plain >= 0).all()):  # also catches NaN
        raise ConfigError(f"{name} must not have negative or NaN entries")
    off = (plain.sum(-1) - 1).abs()
    if bool((off > _SUM_TOLERANCE.get(tensor.dtype, 1e-6)).any()):
        raise ConfigError(f"{name} must sum to 1 over its last dimension, a row is off by {float(off.max()):.3g}")
    return rows


def as_pair(p: Distribution, q: Distribution) -> tuple[torch.Tensor, torch.Tensor]:
    """``p`` and ``q`` checked, on the device of ``p`` and of one shape."""
    target, draft = as_rows("p", p), as_rows("q", q)
    if target.shape[-1] != draft.shape[-1]:
        raise ConfigError(f"p and q must share a vocabulary, got {target.shape[-1]} and {draft.shape[-1]} entries")
    try:
        shape = torch.broadcast_shapes(target.shape, draft.shape)
    except RuntimeError:
        raise ConfigError(f"p and q do not broadcast: {tuple(target.shape)} and {tuple(draft.shape)}") from None
    return target.expand(shape), draft.to(target.device).expand(shape)


def acceptance_rate(p: Distribution, q: Distribution) -> torch.Tensor:
    """beta, the probability that a token drawn from q is kept: ``sum_x min(p(x), q(x))``, in [0, 1].

    [L] definition 3.1 and theorem 3.5. The mean over prefixes is alpha (corollary 3.6). A point mass at x gives p(x).
    """
    target, draft = as_pair(p, q)
    return torch.minimum(target, draft).sum(-1).clamp(max=1.0)


def d_lk(p: Distribution, q: Distribution) -> torch.Tensor:
    """The divergence D_LK: ``sum_x |p(x) - (p(x) + q(x)) / 2|``, in [0, 1]; it is the total variation distance.

    [L] definition 3.2; ``1 - d_lk == acceptance_rate`` (lemma 3.3), symmetric, 0 iff p = q, 1 iff the supports are
    disjoint (corollary 3.4).
    """
    target, draft = as_pair(p, q)
    return (target - (target + draft) / 2).abs().sum(-1).clamp(max=1.0)


def lenient_acceptance_rate(p: Distribution, q: Distribution, lenience: float) -> torch.Tensor:
    """Acceptance with lenience l: ``sum_x min(p(x) / l, q(x))``, in [0, 1]; l = 1 is :func:`acceptance_rate`.

    [L] appendix A.5. Not lossless below 1: a token may become as likely as ``p(x) / l``.
    """
    ratio = as_number("lenience", lenience, 0, 1, above=True)
    target, draft = as_pair(p, q)
    return torch.minimum(target / ratio, draft).sum(-1).clamp(max=1.0)


def lenient_token_distribution(p: Distribution, q: Distribution, lenience: float) -> torch.Tensor:
    """What a lenient step emits: ``min(p/l, q) + (1 - alpha_l) * norm(max(0, p - q))``, of the pair's full shape.

    [L] algorithm 1 with q multiplied by l in the comparison only (A.5); the residual stays the lossless one, which
    keeps the bound ``p(x) / l`` and gives the least distance from p: total variation ``alpha_l - alpha_1`` exactly.
    l = 1 gives p.
    """
    ratio = as_number("lenience", lenience, 0, 1, above=True)
    target, draft = as_pair(p, q)
    kept = torch.minimum(target / ratio, draft)
    residual = (target - draft).clamp(min=0.0)
    mass = residual.sum(-1, keepdim=True)
    rejected = (1 - kept.sum(-1, keepdim=True)).clamp(min=0.0)
    return kept + rejected * residual / torch.where(mass > 0, mass, 1.0)


def lenient_argmax_mask(p: Distribution, lenience: float) -> torch.Tensor:
    """Which drafted tokens pass at temperature 0: ``p(x) >= l * max p``, boolean, of p's shape.

    p is the distribution before standardising to its argmax. [L] appendix A.5 prints ``<=``, which would keep the
    unlikely tokens and drop the best one; l = 1 leaves the argmax alone (all of them where several tie).
    """
    ratio = as_number("lenience", lenience, 0, 1, above=True)
    target = as_rows("p", p)
    return target >= ratio * target.amax(-1, keepdim=True)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Mean tokens that one round emits, the corrected or bonus token included: ``(1 - alpha^(gamma+1)) / (1 - alpha)``.

    [L] equation 1 (also Stratos, "Speculative Decoding", section 1.1.1). In [1, gamma + 1]; alpha = 1 gives gamma + 1.
    """
    rate, length = as_number("alpha", alpha, 0, 1), as_count("gamma", gamma)
    if rate == 0 or length == 0:
        return 1.0
    if rate == 1:
        return float(length + 1)
    tokens = -math.expm1((length + 1) * math.log(rate)) / (1 - rate)  # exact to rounding near alpha = 1 too
    return min(tokens, length + 1.0)


def predicted_speedup(alpha: float, gamma: int, c: float, verify_cost: float) -> float:
    """Speed over plain decoding with a measured verification: ``expected_tokens / (gamma c + verify_cost)``.

    ``verify_cost``: time of a target forward of gamma + 1 rows over one of 1 row, > 0, no unit. [L] theorem 3.8 is
    the case 1. For a rule other than the token level's, pass its match rate as alpha.
    """
    length = as_count("gamma", gamma)
    time = length * as_number("c", c, 0) + as_number("verify_cost", verify_cost, 0, above=True)
    return expected_tokens(alpha, length) / time


def walltime_improvement(alpha: float, gamma: int, c: float) -> float:
    """Speed over plain decoding: ``(1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1))``; verification is free.

    [L] theorem 3.8: gamma + 1 rows cost the target as much time as one. 1 at gamma = 0.
    """
    return predicted_speedup(alpha, gamma, c, 1.0)


def operations_increase(alpha: float, gamma: int, c_hat: float) -> float:
    """Arithmetic operations per token over plain decoding's: ``(gamma c_hat + gamma + 1) / expected_tokens``.

    [L] theorem 3.11. At least 1: wasted rows and the draft's own work; 1 at gamma = 0.
    """
    length, work = as_count("gamma", gamma), as_number("c_hat", c_hat, 0)
    return (length * work + length + 1) / expected_tokens(alpha, length)


def expected_experts(
    count: int, chosen: int, rows: float, again: float | None = None, sequences: int = 1, common: float | None = None
) -> float:
    """Mean number of a layer's ``count`` experts that a forward of ``rows`` rows reads; each row chooses ``chosen``.

    The rows belong to ``sequences`` texts of equal length. ``again`` is the fraction of a row's experts that another
    row of its text chooses, too; ``common`` is the same for a row of another text. None, of either, means independent
    choices: p = chosen / count.

    Independent rows read ``count (1 - (1 - p)^rows)`` experts: Huang et al., "MoESD" (arXiv 2505.19645). But a text
    prefers some experts. Let each expert's probability in a text have a beta distribution of mean p, by which two rows
    share ``again``. Then (beta-binomial distribution; not from that paper) rows miss an expert with probability

    ``L(rows) = product over i < rows of (s (1 - p) + i) / (s + i)``, with ``s = (1 - again) / (again - p)``,

    and read ``count (1 - L)``. The texts' first rows miss an expert as rows of one text with ``common`` do, and each
    text's other rows multiply that by L(rows) / (1 - p).
    """
    experts, each = as_count("count", count, 1), as_count("chosen", chosen, 1)
    texts, size = as_count("sequences", sequences, 1), as_number("rows", rows, sequences)
    p = as_number("chosen / count", each / experts, 0, 1)
    if p == 1:
        return float(experts)
    same, other = (p if share is None else as_number("a share", share, 0, 1) for share in (again, common))
    missed = _missed(p, texts, other) * (_missed(p, size / texts, same) / (1 - p)) ** texts
    return experts * (1 - missed)


def _missed(p: float, rows: float, again: float) -> float:
    """The probability that this many rows of a text all miss an expert."""
    if again >= 1:
        return 1 - p
    if again - p < 1e-6:
        return float((1 - p) ** rows)
    s = (1 - again) / (again - p)
    a = s * (1 - p)
    return math.exp(math.lgamma(a + rows) - math.lgamma(a) + math.lgamma(s) - math.lgamma(s + rows))


def best_gamma(alpha: float, c: float, max_gamma: int = 1024) -> int:
    """The draft length with the greatest :func:`walltime_improvement`, in [0, max_gamma]; the shorter of two equals.

    [L] section 3.5. The improvement rises to one peak and then falls, and token gamma + 1 pays iff
    ``alpha^(gamma+1) (gamma c + 1) > c * expected_tokens(alpha, gamma)``. 0 iff alpha <= c (or alpha = 0); where
    longer is always better (c = 0, or alpha = 1 with c < 1) the answer is ``max_gamma``: pass what the engine allows.
    """
    rate, cost, longest = as_number("alpha", alpha, 0, 1), as_number("c", c, 0), as_count("max_gamma", max_gamma)
    if rate <= cost or rate == 0:
        return 0
    if cost == 0 or rate == 1:
        return longest
    gamma, tokens, power = 0, 1.0, rate
    while gamma < longest and power * (gamma * cost + 1) > cost * tokens:
        gamma, tokens, power = gamma + 1, tokens + power, power * rate
    return gamma
