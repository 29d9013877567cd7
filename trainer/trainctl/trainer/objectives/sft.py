"""Supervised fine-tuning: the next token of what the samples' masks choose, such as the assistant's turns."""

from typing import Final

from trainctl.trainer.objectives.next_token import NextToken

OBJECTIVE: Final = NextToken("sft")
