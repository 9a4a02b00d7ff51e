"""What can go wrong with a model's files and its chat template.

ModelError       a file that is malformed, truncated or of a kind that is not supported
  TemplateError  a conversation that the chat template refuses or can't render
"""

from __future__ import annotations


class ModelError(ValueError):
    """A model that can't be loaded; the message says which file and why."""


class TemplateError(ModelError):
    """A conversation that can't be rendered. The message quotes the template, never the user."""
