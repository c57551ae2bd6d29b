"""What the references print, made again here: ``forerun reproduce`` (docs/reproduction.md)."""
