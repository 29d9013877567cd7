"""Pretraining: the next token of everything, so that data with masks are learned whole, prompts included."""

from typing import Final

from trainctl.trainer.objectives.next_token import NextToken

OBJECTIVE: Final = NextToken("pretrain")
