"""Text to tokens and back: tokenizers, chat templates, reasoning, fill in the middle."""
