"""A report that people share names no machine and no person; figures and versions stay."""

import functools

import pytest
from tests.hardware.redaction import redacted, redacted_value

NAMES = ("annas-mbp.local", "annas-mbp", "anna")


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("host annas-mbp.local of ANNA", "host <name> of <name>"),
        ("in /opt/models/mine: no such file", "in <path>: no such file"),
        ("tcp://192.168.1.5:7474 answers", "tcp://<ip>:7474 answers"),
        ("inet6 fe80::1c2:abcd:12ff:fe34%en0/64 up", "inet6 <ip> up"),
        ("mac 0:18:98:a:1b:2c", "mac <mac>"),
        ("GPU UUID : GPU-1b2c3d4e-1111-2222-3333-444455556666", "GPU UUID : <uuid>"),
        ('"IOPlatformSerialNumber" = "C02ABCDEFG"', '"IOPlatformSerialNumber" = <serial>'),
        ("mail bob@example.org", "mail <mail>"),
        ("torch 2.13.0+cpu at 18:45:00 on 2026-11-26", "torch 2.13.0+cpu at 18:45:00 on 2026-11-26"),
        ("banana split, annas", "banana split, annas"),  # parts of words are no names
    ],
)
def test_what_identifies_is_taken_out_and_the_rest_stays(text: str, wanted: str) -> None:
    assert redacted(text, NAMES) == wanted


@pytest.mark.tier("test")
def test_every_line_and_every_depth_of_a_report_is_redacted() -> None:
    report = {"tests": [{"output": "first\n/home/x/y\nanna\n10.0.0.7 up\nserial: C02ABCDEFG"}], "anna": (1, None)}
    kept = redacted_value(report, functools.partial(redacted, names=NAMES))
    said = "first\n<path>\n<name>\n<ip> up\nserial: <serial>"
    assert kept == {"tests": [{"output": said}], "<name>": [1, None]}
