"""The endless sequence of a file that still grows: its sealed chunks in order, each in a permutation of its own.

Specification, so that another program can reproduce it. Chunk c = 0, 1, ... has N_c samples, and S_c is the sum of N
over the chunks before it. `permute` is that of permutation.py.

    first pass:          position p is in the chunk c with S_c <= p < S_(c+1)
                         sample S_c + permute(p - S_c) of [0, N_c) keyed by (seed, c)
    pass e = 1, 2, ...   only after the end of the file; T is the number of all samples
                         position e T + q is as position q of the first pass, keyed by (seed, e 2^32 + c)

So a position's sample is known as soon as its chunk is sealed, and never changes.
"""

from dataclasses import dataclass

import numpy as np

from trainctl.trainer.data.permutation import Indices, permute

_PASS_SHIFT = 32


@dataclass(frozen=True)
class GrowingOrder:
    """What has been sealed by now; `sealed` and `complete` give the next one."""

    seed: int
    starts: tuple[int, ...] = (0,)  # S_c of each chunk, and the number of all samples
    ended: bool = False

    @property
    def samples(self) -> int:
        """Samples of all sealed chunks."""
        return self.starts[-1]

    @property
    def chunks(self) -> int:
        """Sealed chunks."""
        return len(self.starts) - 1

    def sealed(self, samples: int) -> "GrowingOrder":
        """With another chunk of so many samples, perhaps none."""
        return GrowingOrder(self.seed, (*self.starts, self.samples + samples))

    def complete(self) -> "GrowingOrder":
        """The file has ended."""
        return GrowingOrder(self.seed, self.starts, ended=True)

    def covers(self, stop: int) -> bool:
        """Whether the samples of all positions below `stop` are known."""
        return stop <= self.samples or (self.ended and self.samples > 0)

    def needed(self, cursor: int) -> int:
        """How many chunks, from the first on, the positions below `cursor` are in."""
        if cursor > self.samples:
            return self.chunks
        return int(np.searchsorted(self.starts[:-1], cursor, side="left"))

    def chunk_of(self, samples: Indices) -> Indices:
        """The chunk that each sample is in."""
        chunks: Indices = np.searchsorted(self.starts, samples, side="right") - 1
        return chunks

    def at(self, positions: Indices) -> Indices:
        """The sample at each position, numbered through all chunks. Raises IndexError for one that isn't known yet."""
        if len(positions) and not self.covers(int(positions.max()) + 1):
            raise IndexError(f"position {positions.max()} is not in the {self.samples} sealed samples")
        passes, within = np.divmod(positions, max(1, self.samples))
        chunks = self.chunk_of(within)
        found = np.empty(len(positions), np.int64)
        for turn, chunk in {*zip(passes.tolist(), chunks.tolist(), strict=True)}:
            here = (passes == turn) & (chunks == chunk)
            start, stop = self.starts[chunk : chunk + 2]
            found[here] = start + permute(within[here] - start, stop - start, self.seed, (turn << _PASS_SHIFT) + chunk)
        return found
