"""`python -m trainctl.trainer.selftest.rank_checks CHECK ...`: one check of `trainctl selftest` that needs a rank.

`assets FOLDER` makes the model and the text. `device BACKEND DEVICE`, `precision`, `compile`, `varlen` and `optimizers`
with `RUN.toml NODE`, and `interfaces NAME ...` check. Standard output is one line, a `CheckOutcome`. Exit status 0 if
the check ran, whatever it found. It ends when its standard input does.
"""

import argparse
import os
import sys
import threading
from pathlib import Path
from typing import Literal

import msgspec

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine.check_outcome import CheckOutcome, failed, passed
from trainctl.protocol.machine.process_title import set_title
from trainctl.trainer.common.errors import first_line

Check = Literal["assets", "device", "precision", "compile", "varlen", "optimizers", "interfaces"]


def _run(given: argparse.Namespace) -> CheckOutcome:
    """The chosen check; each loads only the libraries that it needs."""
    check: Check = given.check
    match check:
        case "assets":
            from trainctl.trainer.selftest.small_assets import make_assets

            return passed(**make_assets(given.folder))
        case "device":
            from trainctl.trainer.selftest.device_check import check_device

            return check_device(given.backend, given.device)
        case "precision":
            from trainctl.trainer.selftest.precision_check import check_precision

            return check_precision(given.run_file, given.node)
        case "compile":
            from trainctl.trainer.selftest.compile_check import check_compile

            return check_compile(given.run_file, given.node)
        case "varlen":
            from trainctl.trainer.selftest.varlen_check import check_varlen

            return check_varlen(given.run_file, given.node)
        case "optimizers":
            from trainctl.trainer.selftest.optimizer_check import check_optimizers

            return check_optimizers(given.run_file, given.node)
        case "interfaces":
            from trainctl.trainer.selftest.interface_check import check_interfaces

            return check_interfaces(given.names)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.selftest.rank_checks")
    checks = parser.add_subparsers(dest="check", required=True)
    checks.add_parser("assets").add_argument("folder", type=Path)
    device = checks.add_parser("device")
    device.add_argument("backend", choices=("torch", "mlx"))
    device.add_argument("device")
    for name in ("precision", "compile", "varlen", "optimizers"):
        training = checks.add_parser(name)
        training.add_argument("run_file", type=Path)
        training.add_argument("node")
    checks.add_parser("interfaces").add_argument("names", nargs="+")
    return parser


def _end_with_input() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


def main() -> int:
    """Run one check and print its result; the exit status."""
    given = _parser().parse_args()
    set_title("self-test", given.check)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        outcome = _run(given)
    except (TrainctlError, OSError, RuntimeError, ValueError, MemoryError, ImportError) as error:
        outcome = failed(f"{type(error).__name__}: {first_line(error)}")
    print(msgspec.json.encode(outcome, enc_hook=str).decode(), flush=True)
    os._exit(0)  # a library's thread or a device's clean-up must not hold up the next check


if __name__ == "__main__":
    sys.exit(main())
