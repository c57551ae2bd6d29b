"""Whole vocabularies: the ids that each model's own tokenizer gives."""

import pytest
import vocabularies

from forerun.models.text.gguf_tokenizer import make_tokenizer


@pytest.mark.parametrize("name", vocabularies.NAMES)
def test_ids_are_those_of_the_models_own_tokenizer(vocabulary, name):
    tokenizer = make_tokenizer(vocabulary(name).metadata, name)
    texts = vocabularies.texts(name)
    assert len(texts) == 46
    for text, ids in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == text
