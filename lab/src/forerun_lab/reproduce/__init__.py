"""What the references print, made again here: ``forerun reproduce`` (lab/notebook/reproduction.md)."""
