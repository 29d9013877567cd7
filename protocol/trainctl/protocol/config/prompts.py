"""Prompts for the model: texts to continue, and conversations to answer."""

from typing import Annotated

import msgspec
from msgspec import Meta

PROMPT_CHARACTERS, MAX_ANSWER_TOKENS = 2000, 1024
PromptText = Annotated[str, Meta(min_length=1, max_length=PROMPT_CHARACTERS)]


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]  # role, for example user or system
    content: Annotated[str, Meta(max_length=PROMPT_CHARACTERS)]  # text of the message


Prompt = PromptText | Annotated[tuple[ChatMessage, ...], Meta(min_length=1, max_length=32)]
"""A text to continue, or a conversation to answer."""
