"""A tiny model to talk with."""

from tiny import save_checkpoint, tiny_llama

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save_chat_model(folder):
    """A tiny Llama with a long context and a chat template."""
    save_checkpoint(tiny_llama(max_position_embeddings=1 << 15), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)


QUICK = {"hours": 1 / 3600, "answer": 24, "rows": 40, "min_tokens": 2, "probe": 2, "probe_tokens": 8, "progress": False}
"""Options of a tuning that takes seconds."""
