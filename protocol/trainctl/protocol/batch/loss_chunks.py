"""When the cross-entropy of a micro-batch is computed for some tokens at a time, and how many."""

from typing import NamedTuple

from trainctl.protocol.config.run_tables import ChunkedLoss

CHUNK_LOGITS = 2**25
"""Logits computed at a time: 128 MiB in float32."""
_FLOAT32_BYTES = 4
_FREE_PART = 0.1
"""Fraction of the free memory that the logits may take before "auto" chunks them."""


class Chunking(NamedTuple):
    """The setting, and what it depends on."""

    mode: ChunkedLoss
    vocabulary: int
    free_bytes: int  # as the model was loaded
    logits: int = CHUNK_LOGITS  # at a time

    def chunk_tokens(self, tokens: int) -> int | None:
        """How many tokens a chunk of a micro-batch of `tokens` has; None: don't chunk it."""
        too_large = tokens * self.vocabulary * _FLOAT32_BYTES > self.free_bytes * _FREE_PART
        if self.mode == "off" or (self.mode == "auto" and not too_large):
            return None
        return max(1, self.logits // self.vocabulary)
