"""Encoder-decoder models: the next token of a completion, given its whole prompt through the encoder."""

from typing import Final

from trainctl.trainer.objectives.next_token import NextToken

OBJECTIVE: Final = NextToken("seq2seq")
