"""What identifies a machine or its user is taken out of a report; figures and versions stay."""

import pytest

from trainctl.tui.selftest.redaction import redacted, redactor

REDACT = redactor(
    ["annas-mbp.local", "annas-mbp", "anna", "Anna Example", "x"],
    ["/tmp/trainctl-selftest-abc", "/Volumes/Anna Backup/venv", "/usr", "s3cr3t!"],
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("host annas-mbp.local of ANNA", "host <name> of <name>"),
        ("by Anna Example.", "by <name>."),
        ("model in /tmp/trainctl-selftest-abc/assets/model", "model in <path>"),
        ("/Users/anna/models/mine: no such file", "<path>: no such file"),
        ("see ~/.config/trainctl/keys", "see <path>"),
        ("ipc:///run/user/1000/x.sock", "ipc://<path>"),
        ("tcp://192.168.1.5:7474 answers", "tcp://<ip>:7474 answers"),
        ("inet 10.0.0.7/24", "inet <ip>"),
        ("inet6 fe80::1c2:abcd:12ff:fe34%en0/64 up", "inet6 <ip> up"),
        ("ether f0:18:98:0a:1b:2c", "ether <mac>"),
        ("mac 0:18:98:a:1b:2c", "mac <mac>"),
        ("GPU UUID : GPU-1b2c3d4e-1111-2222-3333-444455556666", "GPU UUID : <uuid>"),
        ('"IOPlatformSerialNumber" = "C02ABCDEFG"', '"IOPlatformSerialNumber" = <serial>'),
        ("Serial Number : 165012345678", "Serial Number : <serial>"),
        ("Serial Number (system): C02ABCDEFG", "Serial Number (system): <serial>"),
        ('"_spdisplays_display-serial-number" : "f9dadada",', '"_spdisplays_display-serial-number" : <serial>,'),
        ("GPU PDI : 0x6ebff5f5f8ba1d5b", "GPU PDI : <id>"),
        ("GPU Fabric GUID : 0x0123456789abcdef", "GPU Fabric GUID : <id>"),
        (" -InternalBattery-0 (id=21823587) 80%;", " -InternalBattery-0 (id=<id>) 80%;"),
        ("enx001a2b3c4d5e is up", "enx<mac> is up"),
        ("/Volumes/Anna Backup/venv/bin/python: not found", "<path>: not found"),
        ("in /usr/lib/x, /usrdata/anna and /usr", "in <path>, <path> and <path>"),
        ("mail anna@example.org", "mail <mail>"),
        ("key is Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID now", "key is <key> now"),
        ("the token s3cr3t! was sent", "the token <secret> was sent"),
    ],
)
def test_what_identifies_is_taken_out(text: str, wanted: str) -> None:
    assert REDACT(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.13.0+cpu, Python 3.11.7, driver 570.86.10",
        "at 18:45:00 on 2026-11-26",
        "1,234 tokens/s, CPU 12 % and/or 3.5 W",
        "sha256 ae964795ccd0cab211dc1b632bbdce0046a9d9aeecab26ffda8dc69611c8e8fe",
        "hw.model: Mac14,13",
        "banana split, annas",  # parts of words are no names
        "x86_64",  # too short to be a name
    ],
)
def test_figures_and_versions_stay(text: str) -> None:
    assert REDACT(text) == text


def test_a_value_is_redacted_at_every_depth() -> None:
    value = {"a": ["/home/anna/x", 3, None, {"anna": True}], "b": ("10.1.2.3",)}
    assert redacted(value, REDACT) == {"a": ["<path>", 3, None, {"anna": True}], "b": ["<ip>"]}


def test_keys_are_the_reports_own_words() -> None:
    redact = redactor(["anna", "outputs"])
    value = {"outputs": {"enx001a2b3c4d5e": "outputs"}, "10.1.2.3": 1}
    assert redacted(value, redact) == {"outputs": {"enx<mac>": "<name>"}, "<ip>": 1}


@pytest.mark.parametrize("name", ["gpu", "linux", "torch", "home"])
def test_a_machine_may_be_named_like_a_word_of_the_report(name: str) -> None:
    assert redactor([name])("Linux, torch on a GPU at home") == "Linux, torch on a GPU at home"


def test_without_names_nothing_is_taken_for_one() -> None:
    assert redactor(["root", "ab"])("root and ab stay") == "root and ab stay"
