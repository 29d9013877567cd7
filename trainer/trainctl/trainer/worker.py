"""`python -m trainctl.trainer.worker`: processes slices of separate work, as its node's agent starts it.

It asks for a slice, processes it, and asks for the next one with the results. It has no state that could be lost.
Exit status 0: told to leave, or the agent is gone; 1: one line on standard error says why.
"""

import argparse
import gc
import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import NodeTable, RunFile, micro_of
from trainctl.protocol.errors import InvalidInputError, ProtocolError
from trainctl.protocol.machine import shim
from trainctl.protocol.machine.process_title import set_title
from trainctl.protocol.messages import AnswerOptions, Leave, WorkAsk, WorkKind, WorkSlice
from trainctl.protocol.messages.requests import ANSWER_BYTES
from trainctl.protocol.record.checkpoints import verify
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.wire import codec, sockets
from trainctl.protocol.wire.codec import with_names
from trainctl.trainer.adapters.lora import read_lora
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.backends.load import import_library, load
from trainctl.trainer.backends.passes import Decoding
from trainctl.trainer.checkpoints.files import ADAPTER, is_base, read_loop
from trainctl.trainer.common import logs
from trainctl.trainer.common.errors import FAILURES, DeviceMemoryError, first_line
from trainctl.trainer.common.libraries import keep_what_is_loaded
from trainctl.trainer.common.logs import log
from trainctl.trainer.common.model_files import longest_context
from trainctl.trainer.data.batch import Tokens, collate, collate_apart
from trainctl.trainer.data.row_tokens import RowTokenizer, row_tokenizer
from trainctl.trainer.data.rows import fields_of, prompt_of, row_of
from trainctl.trainer.step.sampler import Answerer

AGAIN_SECONDS = 1.0
"""Time after which an unanswered request is repeated."""
ERROR_CHARACTERS = 120
"""Longest reason why a row has no result, so that the results of a slice fit into one message."""


@dataclass(frozen=True)
class _Sample:
    place: int  # of the row in its slice
    tokens: Tokens
    counted: NDArray[np.bool_]  # which targets count
    prompt: Tokens  # of an encoder, with a token after it that is never read; empty without an encoder

    @property
    def length(self) -> int:
        """Tokens in a pass, at most."""
        return max(len(self.tokens), len(self.prompt))


class Scorer:
    """A model that scores rows: how likely it finds a completion, an assistant's turns, or a text."""

    def __init__(self, backend: Backend, tokenizer: RowTokenizer, longest: int | None, batch_tokens: int) -> None:
        """`longest`: tokens that the model allows, None: any number. `batch_tokens`: in one forward pass, with
        padding."""
        self._backend, self._tokenizer = backend, tokenizer
        self._longest, self._batch_tokens = longest, batch_tokens

    def process(self, first: int, rows: Sequence[str]) -> list[dict[str, Any]]:
        """Return for each row `logprob` (the sum over its counted tokens, in nats), `tokens` (how many there are) and
        `mean`; or `error`, the reason why it has none."""
        results: list[dict[str, Any]] = [{} for _ in rows]
        samples = []
        for place, row in enumerate(rows):
            try:
                samples.append(self._sample(place, row))
            except InvalidInputError as error:
                results[place] = {"error": error.problem[:ERROR_CHARACTERS]}
        samples.sort(key=lambda sample: -sample.length)
        while samples:  # the longest first, each batch as wide as its first sample
            size = max(1, self._batch_tokens // samples[0].length)
            batch, samples = samples[:size], samples[size:]
            for sample, logprob in zip(batch, self._sums(batch), strict=True):
                count = int(sample.counted.sum())
                results[sample.place] = {"logprob": logprob, "tokens": count, "mean": logprob / count}
        return results

    def _sample(self, place: int, row: str) -> _Sample:
        """Return a row's tokens. Raises InvalidInputError if the model can't score it."""
        parsed, prompt = row_of(fields_of(row, "row"), "row"), list[int]()
        if self._tokenizer.encodes_prompts:
            (prompt, _), (tokens, mask) = self._tokenizer.encode([parsed])
        else:
            ((tokens, mask),) = self._tokenizer.encode([parsed])
        longest = max(len(tokens), len(prompt)) - (1 if prompt else 0)  # both have one that isn't counted
        if self._longest is not None and longest > self._longest:
            raise InvalidInputError("row", f"is {longest:,} tokens long; the model allows {self._longest:,}")
        counted = np.array(mask[1:], np.bool_)
        if not counted.any():
            raise InvalidInputError("row", "has no token to score: the first token has no log-probability")
        return _Sample(place, np.array(tokens, np.int32), counted, np.array(prompt, np.int32))

    def _sums(self, batch: Sequence[_Sample]) -> list[float]:
        """Return the sums of a batch, in halves if memory is short. Raises DeviceMemoryError if it isn't enough for one
        row."""
        rows = [(sample.tokens, sample.counted) for sample in batch]
        prompts = [sample.prompt for sample in batch]
        try:
            whole = collate_apart(prompts, rows) if len(prompts[0]) else collate(rows)
            log_probabilities = self._backend.token_log_probabilities(whole)
        except DeviceMemoryError:
            if len(batch) == 1:
                raise
        else:
            return [math.fsum(row) for row in log_probabilities * whole.counted]
        half = len(batch) // 2
        self._batch_tokens = max(1, half * batch[0].length)
        return self._sums(batch[:half]) + self._sums(batch[half:])


class RowAnswerer:
    """A model that answers rows."""

    def __init__(self, answerer: Answerer, how: Decoding) -> None:
        self._answerer, self._how = answerer, how

    def process(self, first: int, rows: Sequence[str]) -> list[dict[str, Any]]:
        """Return for each row, of which the first has index `first`: `answer`, `tokens` (how many were generated) and
        `ended` (whether the model ended the answer); `cut` if the answer was too large; or `error`, the reason why it
        has none."""
        return [self._result(number, row) for number, row in enumerate(rows, first)]

    def _result(self, number: int, row: str) -> dict[str, Any]:
        how = replace(self._how, seed=row_seed(self._how.seed, number))
        try:
            answer = self._answerer.answer(prompt_of(fields_of(row, "row"), "row"), how, lambda: None)
        except InvalidInputError as error:
            return {"error": error.problem[:ERROR_CHARACTERS]}
        except (ValueError, TypeError, KeyError, IndexError) as error:  # of a library, about this row
            return {"error": first_line(error)[:ERROR_CHARACTERS]}
        text = fitting(answer.text, ANSWER_BYTES)
        cut = {"cut": True} if text != answer.text else {}
        return {"answer": text, "tokens": answer.tokens, "ended": answer.ended, **cut}


def row_seed(seed: int, number: int) -> int:
    """Return a row's own seed, whichever node answers it."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def fitting(text: str, size: int) -> str:
    """Return the longest start of a text that is at most `size` bytes long as a JSON string."""
    text = text.encode("utf-8", "replace").decode()
    if len(msgspec.json.encode(text)) <= size:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(msgspec.json.encode(text[:middle])) <= size else (low, middle - 1)
    return text[:low]


def main() -> int:
    """Work until the agent says to leave; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.worker", description="Process slices.")
    parser.add_argument("--work-directory", type=Path, required=True, metavar="DIR", help="folder with run.toml")
    parser.add_argument("--work", required=True, metavar="ID", help="work ID")
    parser.add_argument("--kind", required=True, choices=get_args(WorkKind))
    parser.add_argument("--options", default="{}", metavar="JSON", help="how the tokens of answers are chosen")
    parser.add_argument("--node", required=True, metavar="NAME", help="name of this node in the run file")
    parser.add_argument("--endpoint", required=True, metavar="ipc://PATH", help="address of the node's agent")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint folder")
    parser.add_argument("--agent", type=int, required=True, metavar="PID", help="process ID of the node's agent")
    wanted = parser.parse_args()
    set_title("worker", f"work {wanted.work}")
    logs.configure()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        gc.disable()  # what libraries make as they are imported stays: looking through it takes a fifth of the time
        processor, device = _processor(wanted)
        keep_what_is_loaded()
        _serve(wanted, processor, device)
    except FAILURES as error:
        log.error("work %s: %s", wanted.work, first_line(error))
        return 1
    return 0


def _processor(wanted: argparse.Namespace) -> tuple[Scorer | RowAnswerer, str]:
    """Return the loaded model for this kind of work, and its device."""
    paths = RunPaths(wanted.work_directory)
    where, config = str(paths.run_file), run_file.read(paths.run_file)
    import_library(config, wanted.node, where)
    model = load_checkpoint(wanted.checkpoint, config, wanted.node, where)
    tokenizer = row_tokenizer(model.directory, model.config.data.tokenizer, where)
    device = f"{model.backend.name} {model.backend.device.name}"
    if wanted.kind == "answers":
        log.info("answering on %s", model.backend.device.name)
        answerer = Answerer(model.backend, tokenizer, model.longest, plain=model.config.data.kind == "text")
        options = msgspec.json.decode(wanted.options, type=AnswerOptions)
        return RowAnswerer(answerer, answerer.decoding(options, model.directory)), device
    micro = micro_of(config, config.nodes.get(wanted.node, NodeTable()))
    tokens = micro * config.data.sequence_length  # a forward and backward pass of so many was possible
    log.info("scoring on %s, %s tokens at a time", model.backend.device.name, f"{tokens:,}")
    return Scorer(model.backend, tokenizer, model.longest, tokens), device


def _serve(wanted: argparse.Namespace, processor: Scorer | RowAnswerer, device: str) -> None:
    ask = WorkAsk(run=wanted.work, rank=0, device=device)
    agent_started = shim.start_time(wanted.agent)
    context = zmq.Context()
    socket = sockets.new_socket(context, zmq.DEALER)
    try:
        socket.connect(wanted.endpoint)
        while shim.start_time(wanted.agent) == agent_started is not None:
            socket.send(codec.encode(ask))
            while socket.poll(AGAIN_SECONDS * 1000):
                try:
                    order = codec.decode_order(sockets.check_frames(socket.recv_multipart(), 1)[0])
                except ProtocolError as error:
                    log.warning("dropped a message from the agent: %s", error)
                    continue
                if isinstance(order, Leave):
                    return
                if isinstance(order, WorkSlice) and order.slice != ask.answered:  # not one that was sent twice
                    results = tuple(
                        msgspec.json.encode(with_names(row)) for row in processor.process(order.first, order.rows)
                    )
                    ask = WorkAsk(run=wanted.work, rank=0, device=device, answered=order.slice, results=results)
                    break
        log.warning("the agent is gone")
    finally:
        context.destroy(linger=0)


@dataclass(frozen=True)
class CheckpointModel:
    """A loaded model."""

    backend: Backend
    config: RunFile  # as it is on this node
    directory: Path  # that has the model's configuration and tokenizer
    longest: int | None  # tokens that the model allows; None: it doesn't say


def load_checkpoint(checkpoint: Path, config: RunFile, node: str, where: str) -> CheckpointModel:
    """Load a checkpoint's model. Raises InvalidInputError if it is damaged, or its adapters' base is missing here or
    another one."""
    from safetensors.numpy import load_file

    verify(checkpoint)
    config = run_file.on_this_machine(config, node)
    directory = Path(config.model.path) if config.adapter.kind != "full" else checkpoint
    if not (directory / "config.json").is_file():
        raise InvalidInputError(f"{where}: model.path", f"the adapters' base model is missing on {node}: {directory}")
    model = msgspec.structs.replace(config.model, path=str(directory), init="pretrained")
    config = msgspec.structs.replace(config, model=model)
    if config.adapter.kind != "full":
        wanted = read_loop(checkpoint).base_digest
        if not is_base(directory, read_lora(config, where), wanted):
            problem = f"{directory} on {node} is not the model that the adapters were trained on: its files differ"
            raise InvalidInputError(f"{where}: model.path", problem)
    backend = load(config, config.nodes.get(node, NodeTable()), where, trains=False)
    if config.adapter.kind != "full":
        backend.copy_in("weights", load_file(checkpoint / ADAPTER))  # readable: `verify` has compared its digest
    return CheckpointModel(backend, config, directory, longest_context(directory))


if __name__ == "__main__":
    sys.exit(main())
