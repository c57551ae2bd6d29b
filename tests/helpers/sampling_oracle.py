"""One row of logits at a time, in float64, straight from vLLM's description of each option."""

import numpy


def edited(logits, params, prompt, output, eos):
    """Bias, bans and penalties: what greedy requests take the argmax of."""
    values = numpy.array(logits, dtype=numpy.float64)
    if params.allowed_token_ids:
        values[[token for token in range(len(values)) if token not in params.allowed_token_ids]] = -numpy.inf
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for word in params.bad_words_ids:
        if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]) and len(output) >= len(word) - 1:
            values[word[-1]] = -numpy.inf
    if len(output) < params.min_tokens:
        for token in {*eos, *params.stop_token_ids}:
            values[token] = -numpy.inf
    for token in range(len(values)):
        count = list(output).count(token)
        if params.repetition_penalty != 1.0 and (count or token in prompt):
            if values[token] > 0:
                values[token] /= params.repetition_penalty
            else:
                values[token] *= params.repetition_penalty
        values[token] -= params.frequency_penalty * count
        if count:
            values[token] -= params.presence_penalty
    return values


def softmax(values):
    weights = numpy.exp(values - values.max())
    return weights / weights.sum()


def kept(values, params, slack=0.0):
    """Which tokens min-p, top-k and top-p leave, of logits that are already divided by the temperature. ``slack``
    moves the thresholds, to tell a wrong decision from a rounded one."""
    values = values.copy()
    if params.min_p > 0:
        probabilities = softmax(values)
        values[probabilities < params.min_p * probabilities.max() * (1 + slack)] = -numpy.inf
    if 0 < params.top_k < len(values):
        values[values < sorted(values)[-params.top_k]] = -numpy.inf
    if params.top_p < 1.0:
        probabilities = softmax(values)
        total = 0.0
        for token in numpy.argsort(-probabilities):
            total += probabilities[token]
            if total >= params.top_p * (1 + slack):
                break
        values[probabilities < probabilities[token]] = -numpy.inf
    return values > -numpy.inf
