"""Measurements: speed against plain decoding and peers, and proof that nothing is lost."""
