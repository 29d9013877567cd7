"""A token cache that is larger than the trainer's memory: its pages are the kernel's, and are read as they are needed.

The limit is on private memory (RLIMIT_DATA), since pages of a mapped file count for no process. `make soak` has a
cache of 3 GB, with 1.5 GB for the process.
"""

import json
import re
import resource
from pathlib import Path

import numpy as np
import pytest
from tests.tiers import scale
from tests.trainer.support.process_agent import FIRST

from trainctl.protocol import messages as m
from trainctl.trainer.data.token_cache import cache_name

pytestmark = pytest.mark.tier("all")

CACHE_BYTES = scale("bytes of a large cache")
PRIVATE_BYTES = 600_000_000 if CACHE_BYTES <= 1_000_000_000 else 1_500_000_000
SAMPLE_TOKENS = 400


def write_cache(folder):
    """Samples of equal length whose second half counts; the number of them."""
    samples = CACHE_BYTES // (3 * SAMPLE_TOKENS + 8)
    folder.mkdir(parents=True)
    at_once = 10_000
    for name, one in (
        ("tokens.bin", np.arange(SAMPLE_TOKENS, dtype="<u2") % 200),
        ("counted.bin", np.arange(SAMPLE_TOKENS) >= SAMPLE_TOKENS // 2),
    ):
        with (folder / name).open("wb") as file:
            for begin in range(0, samples, at_once):
                file.write(one.tobytes() * min(at_once, samples - begin))
    (np.arange(samples + 1, dtype="<i8") * SAMPLE_TOKENS).tofile(folder / "offsets.bin")
    notes = {"dtype": "<u2", "digest": "large", "files": [], "has_end": True, "prompt_end": 0, "remarks": {}}
    (folder / "cache.json").write_text(json.dumps(notes), "utf-8")
    return samples


@pytest.mark.needs("linux")  # only Linux limits a process's private memory
def test_a_cache_larger_than_memory_is_trained_on(agent, run_file, tmp_path):
    source = tmp_path / "samples.jsonl"
    source.write_text('{"tokens": [1, 2]}\n', "utf-8")
    config = run_file(data__path=str(source), data__kind="samples", data__sequence_length=512)
    folder = agent.paths.node_data / cache_name(config)
    samples = write_cache(folder)
    process = agent.start()
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (PRIVATE_BYTES, PRIVATE_BYTES))
    ready = agent.hear(m.Ready)
    assert ready.samples + ready.held_out == samples
    agent.form(FIRST)
    for step in (1, 2, 3):
        assert agent.step(step, step).weight == 12 * SAMPLE_TOKENS / 2
    status = Path(f"/proc/{process.pid}/status").read_text("ascii")
    found = re.search(r"VmData:\s+(\d+) kB", status)
    assert found is not None and int(found[1]) * 1024 <= PRIVATE_BYTES < CACHE_BYTES
    agent.leave(process)
    (folder / "tokens.bin").unlink()
    (folder / "counted.bin").unlink()
