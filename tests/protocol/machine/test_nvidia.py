"""NVIDIA devices by recorded outputs of nvidia-smi, and by a program of that name that prints them."""

import stat
import sys
from pathlib import Path

import pytest

from trainctl.protocol.machine import nvidia

A, B = "GPU-5d1f3d3c-0c3f-8a5b-4a63-1f0f2f6b7c11", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
UNEQUAL = f"8.6, {A}\n6.1, {B}\n"
OLD_DRIVER = 'Field "compute_cap" is not a valid field to query.\n\n'


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (UNEQUAL, (nvidia.Card((8, 6), A), nvidia.Card((6, 1), B))), (f"12.0, {A}\r\n", (nvidia.Card((12, 0), A),)),
        (f"[N/A], {A}\n8.6, {B}\n", ()), ("No devices were found\n", ()), (OLD_DRIVER, ()),
    ],
)  # fmt: skip
def test_cards_are_read_from_nvidia_smi(said: str, found: tuple[nvidia.Card, ...]) -> None:
    assert nvidia.parse_cards(said) == found


@pytest.mark.parametrize(("status", "cards", "version"), [(0, nvidia.parse_cards(UNEQUAL), "570.86.10"), (2, (), "")])
def test_nvidia_smi_is_asked_where_nvmls_module_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, cards: tuple[nvidia.Card, ...], version: str
) -> None:
    program = tmp_path / "nvidia-smi"
    wanted = "--query-gpu=compute_cap,uuid --format=csv,noheader,nounits"
    other = "echo 570.86.10; echo 570.86.10"  # a line for each device
    program.write_text(f'#!/bin/sh\nif [ "$*" = "{wanted}" ]; then echo "{UNEQUAL}"; else {other}; fi\nexit {status}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it weren't installed
    assert nvidia.cards.__wrapped__() == cards
    assert nvidia.driver_version.__wrapped__() == version
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert nvidia.cards.__wrapped__() == ()


def test_devices_are_those_of_cuda_visible_devices_in_its_order() -> None:
    by_uuid = {"GPU-10aa": "a", "GPU-8932f937-d72c": "b", "GPU-89aa": "c"}
    shown = {
        "": "", "0": "a", "2,1": "cb", "0,2,-1,1": "ac", "7": "", " 1 , 0": "ba", "GPU-8932f937": "b", "GPU-89": "",
        "GPU-1,0": "a", "GPU-89aa,0": "ca", "1,1": "b", "MIG-1/2/0": "", "nonsense": "",
    }  # fmt: skip
    assert {chosen: "".join(nvidia.visible(chosen, ["a", "b", "c"], by_uuid)) for chosen in shown} == shown
