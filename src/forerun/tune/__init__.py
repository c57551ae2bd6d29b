"""``forerun tune``: a draft for a model of one's own, trained and chosen on the machine that will use it."""
