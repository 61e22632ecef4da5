"""A new model that learns in minutes on a CPU, and its tokenizer: `model.path = "tiny"`."""

from flowtrain.toy.model import END, PAD, new_model, new_tokenizer

__all__ = ["END", "PAD", "new_model", "new_tokenizer"]
