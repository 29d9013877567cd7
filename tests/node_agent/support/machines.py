"""Machines as their trainers describe them."""

from trainctl.protocol import messages as m


def ready(system: str, *engines_there: str) -> m.Ready:
    return m.Ready(
        run="r", rank=0, pid=1, backend="torch", device="cpu", parameters=1, samples=1, held_out=0, mean_weight=1.0,
        layout_digest="", model_digest="", data_digest="", last_step=0, cursor=0, system=system, engines=engines_there,
    )  # fmt: skip


LINUX, MAC = ready("Linux", "gloo", "ring"), ready("Darwin", "gloo", "ring")
LINUX_MLX, LINUX_TORCH, MAC_TORCH = ready("Linux", "ring"), ready("Linux", "gloo"), ready("Darwin", "gloo")
