"""Logits of p and q, their distributions and KL(p, q) in plain numbers."""

import math

import torch

P_LOGITS = [[0.3, -1.2, 2.0, 0.0], [4.0, 0.0, 0.0, -3.0], [0.0, 0.0, 0.0, 0.0]]
Q_LOGITS = [[1.3, 0.2, 0.5, -1.0], [-4.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]]


def distribution(logits):
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


PAIRS = [(distribution(p), distribution(q)) for p, q in zip(P_LOGITS, Q_LOGITS)]
KL = [sum(a * math.log(a / b) for a, b in zip(p, q)) for p, q in PAIRS]


def compute(loss):
    return loss(torch.tensor(P_LOGITS, dtype=torch.float64), torch.tensor(Q_LOGITS, dtype=torch.float64)).tolist()
