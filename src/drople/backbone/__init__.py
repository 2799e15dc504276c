"""A frozen transformers CLIP, walked layer by layer."""

from drople.backbone.clip import Backbone, Sentences
from drople.backbone.tokens import Tokens

__all__ = ["Backbone", "Sentences", "Tokens"]
