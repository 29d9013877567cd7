"""What identifies a machine or its user is taken out of a report; figures and versions stay."""

import pytest

from trainctl.tui.selftest.raw_outputs import without_addresses, without_processes
from trainctl.tui.selftest.redaction import redacted, redactor

REDACT = redactor(["annas-mbp.local", "annas-mbp", "anna", "Anna Example"], ["/Volumes/Anna Backup/venv", "s3cr3t!"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("host annas-mbp.local of ANNA", "host <name> of <name>"),
        ("/Users/anna/models/mine: no such file", "<path>: no such file"),
        ("/Volumes/Anna Backup/venv/bin/python: not found", "<path>: not found"),
        ("tcp://192.168.1.5:7474 answers", "tcp://<ip>:7474 answers"),
        ("inet6 fe80::1c2:abcd:12ff:fe34%en0/64 up", "inet6 <ip> up"),
        ("mac 0:18:98:a:1b:2c", "mac <mac>"),
        ("GPU UUID : GPU-1b2c3d4e-1111-2222-3333-444455556666", "GPU UUID : <uuid>"),
        ('"IOPlatformSerialNumber" = "C02ABCDEFG"', '"IOPlatformSerialNumber" = <serial>'),
        ("mail anna@example.org", "mail <mail>"),
        ("key is Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID now", "key is <key> now"),
        ("the token s3cr3t! was sent", "the token <secret> was sent"),
        ("torch 2.13.0+cpu at 18:45:00 on 2026-11-26", "torch 2.13.0+cpu at 18:45:00 on 2026-11-26"),
        ("banana split, annas", "banana split, annas"),  # parts of words are no names
    ],
)
def test_what_identifies_is_taken_out_and_the_rest_stays(text: str, wanted: str) -> None:
    assert REDACT(text) == wanted


def test_a_value_is_redacted_at_every_depth() -> None:
    value = {"a": ["/home/anna/x", 3, None, {"anna": True}], "b": ("10.1.2.3",)}
    assert redacted(value, REDACT) == {"a": ["<path>", 3, None, {"anna": True}], "b": ["<ip>"]}


def test_outputs_of_the_systems_programs_keep_no_address_and_no_process_of_others() -> None:
    counters = "5000000     1 6000000000  2000000     2  300000000     0"
    netstat = (
        "Name       Mtu   Network       Address            Ipkts Ierrs     Ibytes    Opkts Oerrs     Obytes  Coll\n"
        f"en0  1500  <Link#11>    f0:18:98:0a:1b:2c  {counters}\nen0  1500  192.168.178  192.168.178.23  {counters}\n"
    )
    kept = " ".join(counters.split())
    lines = [f"en0 1500 <Link#11> <address> {kept}", f"en0 1500 <network> <address> {kept}"]
    assert without_addresses(netstat).splitlines()[1:] == lines
    assert without_addresses("Iface MTU RX-OK\neth0 1500 192.168.178\n") == "", "another form is not kept"
    process = "        Process ID : 1234\n            Name : /home/anna/bin/python\n"
    nvidia = f"GPU 1\n    Processes\n{process}\n    Clocks\n        SM : 345 MHz\n"
    names = [line.split(":")[0].strip() for line in without_processes(nvidia).splitlines()]
    assert names == ["GPU 1", "Processes", "Clocks", "SM"]
