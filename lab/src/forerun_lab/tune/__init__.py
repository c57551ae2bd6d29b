"""``forerun tune`` without ``--draft``: text of the model's own, trained heads, and the choice of the fastest."""
