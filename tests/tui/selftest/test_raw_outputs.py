"""Recordings of the system's programs have no addresses and no processes of others."""

from trainctl.tui.selftest.raw_outputs import without_addresses, without_processes

NETSTAT = """\
Name       Mtu   Network       Address            Ipkts Ierrs     Ibytes    Opkts Oerrs     Obytes  Coll
lo0        16384 <Link#1>                          1000     0     200000     1000     0     200000     0
lo0        16384 127           127.0.0.1           1000     -     200000     1000     -     200000     -
en0        1500  <Link#11>   f0:18:98:0a:1b:2c  5000000     1 6000000000  2000000     2  300000000     0
en0        1500  192.168.178   192.168.178.23   5000000     - 6000000000  2000000     -  300000000     -
en0        1500  2a02:8109:b6 2a02:8109:b6c0:1: 5000000     - 6000000000  2000000     -  300000000     -
"""
NVIDIA = """\
GPU 00000000:01:00.0
    Product Name                          : NVIDIA H100
    Processes
        Process ID                        : 1234
            Type                          : C
            Name                          : /home/anna/venv/bin/python

            Used GPU Memory               : 1000 MiB
    Capabilities
        EGM                               : disabled
GPU 00000000:02:00.0
    Product Name                          : NVIDIA H200
    Processes                             : None
    Clocks
        SM                                : 345 MHz
"""


def test_networks_and_addresses_are_left_out() -> None:
    lines = without_addresses(NETSTAT).splitlines()
    assert lines[0] == NETSTAT.splitlines()[0]
    assert lines[1:] == [
        "lo0 16384 <Link#1> 1000 0 200000 1000 0 200000 0",
        "lo0 16384 <network> <address> 1000 - 200000 1000 - 200000 -",
        "en0 1500 <Link#11> <address> 5000000 1 6000000000 2000000 2 300000000 0",
        "en0 1500 <network> <address> 5000000 - 6000000000 2000000 - 300000000 -",
        "en0 1500 <network> <address> 5000000 - 6000000000 2000000 - 300000000 -",
    ]


def test_an_output_of_another_form_is_not_kept() -> None:
    assert without_addresses("Iface MTU RX-OK\neth0 1500 192.168.178\n") == ""
    assert without_addresses("") == ""


def test_processes_are_left_out() -> None:
    text = without_processes(NVIDIA)
    assert "1234" not in text and "anna" not in text and "Used GPU" not in text
    assert [line.split(":")[0].strip() for line in text.splitlines()] == [
        "GPU 00000000", "Product Name", "Processes", "Capabilities", "EGM",
        "GPU 00000000", "Product Name", "Processes", "Clocks", "SM",
    ]  # fmt: skip
