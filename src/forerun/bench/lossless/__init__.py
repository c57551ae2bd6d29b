"""Is speculation lossless here, on this model? Identity, bits and law, each with an oracle of its own."""

from forerun.bench.lossless.run import CheckConfig, run_checks

__all__ = ["CheckConfig", "run_checks"]
