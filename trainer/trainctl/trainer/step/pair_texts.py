"""The texts of held-out pairs, for who reads what an evaluation found."""

import functools
from pathlib import Path

import msgspec
import numpy as np

from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import EvaluatedPair
from trainctl.trainer.data.growing_dataset import TrainingData
from trainctl.trainer.data.row_tokens import RowTokenizer, row_tokenizer
from trainctl.trainer.step.sampler import cut

PROMPT_BYTES, ANSWER_BYTES = 160, 240


class PairTexts:
    """Of a run's data."""

    def __init__(self, config: RunFile, data: TrainingData) -> None:
        self._config, self._data = config, data

    def described(self, pair: EvaluatedPair) -> EvaluatedPair:
        """With its texts, cut. Raises what tokenizers do."""
        (prompt, chosen), (_, rejected) = self._halves(pair.index)
        return msgspec.structs.replace(
            pair, prompt=_end(prompt, PROMPT_BYTES), chosen_text=cut(chosen, ANSWER_BYTES),
            rejected_text=cut(rejected, ANSWER_BYTES),
        )  # fmt: skip

    @functools.cached_property
    def _tokenizer(self) -> RowTokenizer:
        return row_tokenizer(Path(self._config.model.path), self._config.data.tokenizer, "run file")

    def _halves(self, index: int) -> list[tuple[str, str]]:
        """Prompt and answer of both rows: what comes before the first target that counts, and all from there on."""
        batch, made = self._data.held_out_batch(np.array([index])), []
        for inputs, targets, counted, length in zip(
            batch.inputs, batch.targets, batch.counted, batch.lengths, strict=True
        ):
            tokens = [int(inputs[0]), *targets[:length].tolist()]
            first = int(np.argmax(counted > 0)) + 1
            made.append((self._tokenizer.text(tokens[:first]), self._tokenizer.text(tokens[first:])))
        return made


def _end(text: str, size: int) -> str:
    """At most so many bytes of UTF-8, the last ones."""
    encoded = text.encode("utf-8", "replace")
    return encoded[-size:].decode("utf-8", "ignore")
