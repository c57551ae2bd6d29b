"""``load.py`` goes from a name through ``files``, ``weights`` and ``formats`` to what ``run`` or ``ranks`` runs.
``architectures`` describes the families, and ``text`` has the tokenizers."""
