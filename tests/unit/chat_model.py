"""A tiny model to talk with."""

from tiny import save_tokenizer, tiny_llama

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save_chat_model(folder):
    """A tiny Llama with a long context and a chat template."""
    tiny_llama(max_position_embeddings=1 << 15).save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)
