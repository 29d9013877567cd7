"""Presets by capability and by name."""

from trainctl.protocol.config.usual_settings import AMPERE, GTX_16, HOPPER, PASCAL, TURING, preset_of, preset_of_device


def test_a_capability_and_a_name_have_the_preset_of_their_architecture() -> None:
    by_capability = {
        (6, 1): PASCAL, (7, 0): TURING, (8, 9): AMPERE, (9, 0): HOPPER, (10, 3): HOPPER, (11, 0): HOPPER,
        (12, 0): AMPERE, (12, 1): AMPERE,
    }  # fmt: skip
    assert {capability: preset_of(capability) for capability in by_capability} == by_capability
    by_name = {
        "NVIDIA RTX A6000": AMPERE, "NVIDIA A800-SXM4-80GB": AMPERE, "NVIDIA RTX 2000E Ada Generation": AMPERE,
        "NVIDIA GeForce RTX 2050": AMPERE, "NVIDIA GeForce RTX 2080 Ti": TURING, "NVIDIA GB10": AMPERE,
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": AMPERE, "NVIDIA GH200 480GB": HOPPER, "Quadro RTX 6000": TURING,
        "NVIDIA GeForce GTX 1650": GTX_16, "NVIDIA GeForce RTX 3090": AMPERE, "cuda:0 Tesla V100-SXM2-16GB": TURING,
        "NVIDIA of tomorrow": None, "cpu": None,
    }  # fmt: skip
    assert {name: preset_of_device(name) for name in by_name} == by_name
