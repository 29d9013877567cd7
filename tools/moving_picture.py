"""docs/pictures/overview.svg: the full screen in a few scenes of a real demo run, as one SVG that moves by itself.

`python -m tools.moving_picture [FILE]` starts `trainctl demo`, which trains on this machine, moves samples, kills a
trainer, and draws what the screen shows; it takes about two minutes.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainctl.protocol.messages import RankState
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.app.screenshot import svg
from trainctl.tui.state.source import ClusterSource

SIZE: Final = (110, 30)
"""Columns and lines of the screen that is drawn."""
SCENE_SECONDS: Final = 2.5
"""Seconds for which each scene is shown."""
PATIENCE_SECONDS: Final = 300.0
"""Seconds that a scene may take to come."""


@dataclass(frozen=True)
class Scene:
    """A picture of the screen: the keys before it, and what it waits for."""

    keys: Sequence[str]
    until: Callable[[TrainctlApp], bool]
    does: Callable[[TrainctlApp], None] = lambda _: None


def _step(app: TrainctlApp) -> int:
    return app.live.run.step if app.live.run is not None else 0


def _states(app: TrainctlApp) -> set[RankState]:
    return {rank.state for rank in app.live.run.ranks} if app.live.run is not None else set()


def _kill_a_trainer(app: TrainctlApp) -> None:
    """Kill that of rank 1, which is this user's own process."""
    ranks = app.live.run.ranks if app.live.run is not None else ()
    pid = next((rank.pid for rank in ranks if rank.rank == 1), None)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


SCENES: Final = (
    Scene((), lambda app: _step(app) >= 40),
    Scene(("s",), lambda app: True),
    Scene(("right", "right", "right", "right"), lambda app: True),
    Scene(
        ("enter",),
        lambda app: any(event.verb == "rebalance" and event.outcome == "applied" for event in app.live.events),
    ),
    Scene(("escape",), lambda app: _step(app) >= 90),
    Scene((), lambda app: bool(_states(app) & {"lost", "rejoining"}), _kill_a_trainer),
    Scene((), lambda app: _states(app) == {"run"}),
    Scene((), lambda app: _step(app) >= 150),
    Scene(("3",), lambda app: True),
)
"""A run that learns, a split that is moved and applied, a trainer that is killed and comes back, and the charts."""


async def scenes(address: str) -> list[str]:
    """Return each scene as an SVG document."""
    app = TrainctlApp(lambda: ClusterSource(address, by="anna"), address=address)
    drawn = []
    async with app.run_test(size=SIZE) as pilot:
        for scene in SCENES:
            scene.does(app)
            await pilot.press(*scene.keys)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not scene.until(app):
                    await pilot.pause(0.05)
            await pilot.pause(1.0)
            drawn.append(svg(app))
    return drawn


def moving(pictures: Sequence[str], seconds: float = SCENE_SECONDS) -> str:
    """Return one SVG that shows each picture for `seconds`, again and again. Their names are apart already: each is
    made from what is in it."""
    box = re.search(r'viewBox="([^"]*)"', pictures[0])
    if box is None:
        raise ValueError("no picture of a screen")
    whole, share = seconds * len(pictures), 100 / len(pictures)
    style = f"""
.scene {{ visibility: hidden; animation: scene {whole:g}s step-end infinite; }}
@keyframes scene {{ 0% {{ visibility: visible; }} {share:.3f}% {{ visibility: hidden; }} }}"""
    delays = []
    scenes = []
    for index, picture in enumerate(pictures):
        delays.append(f".scene-{index} {{ animation-delay: {seconds * index - whole:g}s; }}")
        scenes.append(f'<g class="scene scene-{index}">{picture.strip()}</g>')
    head = f'<svg viewBox="{box[1]}" xmlns="http://www.w3.org/2000/svg">'
    return "\n".join([head, f"<style>{style}", *delays, "</style>", *scenes, "</svg>", ""])


def main() -> int:
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures/overview.svg")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainctl.tui.cli.main", "demo", "--headless", "--steps", "2000"]
        command += ["--folder", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as demo:
            assert demo.stderr is not None
            try:
                said = next(found for line in demo.stderr if (found := re.search(r" at (ipc://\S+), in ", line)))
                file.write_text(moving(asyncio.run(scenes(said[1]))), "utf-8")
            finally:
                demo.send_signal(signal.SIGINT)
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
