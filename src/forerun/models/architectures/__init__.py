"""Architectures as data: ``description.py`` says what one is made of, ``families.py`` lists them, ``spec.py`` reads a
checkpoint's config by one."""
