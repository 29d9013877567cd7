"""`trainctl exec` before a real agent: scripts run as without, and the run has their log, steps and control."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.asking import events_of
from tests.integration.conftest import AgentProcess
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.messages import LogRequest, RunsRequest, RunSummary, SnapshotRequest, StepCommitted, StepsRequest

EXEC = [sys.executable, "-m", "trainctl.tui.cli.main", "exec"]
LOOP = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
def main():
    torch.manual_seed(0)
    steps, seconds, workers = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    data = TensorDataset(torch.randn(64, 4))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    options = {"num_workers": 2, "multiprocessing_context": workers[0]} if workers else {}
    done = 0
    while done < steps:
        for (batch,) in DataLoader(data, batch_size=8, **options):
            loss = ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
            print(done, repr(loss.item()), flush=True)
            LOG
            time.sleep(seconds)
            if done == steps:
                break
    print("weights", model.weight.sum().item())
if __name__ == "__main__":
    main()
"""
TENSORBOARD = """
            if done == 1:
                from torch.utils.tensorboard import SummaryWriter
                global writer
                writer = SummaryWriter("logs")
            writer.add_scalar("train/loss", loss.item(), done)
            writer.add_scalar("weight", model.weight[0, 0].item(), done)
"""


def script(folder: Path, text: str, log: str = "") -> list[str]:
    path = folder / "train.py"
    path.write_text(text.replace("            LOG\n", log), "utf-8")
    return [sys.executable, str(path)]


def bare(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*command], cwd=folder, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)


def watched(
    agent: AgentProcess, folder: Path, *command: str, options: tuple[str, ...] = (), **env: str
) -> "subprocess.CompletedProcess[str]":
    words = [*EXEC, "--name", "guest", *options, "--", *command]
    env = {**os.environ, "TRAINCTL_CONNECT": agent.address, **env}
    return subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )  # fmt: skip


@contextlib.contextmanager
def begun(agent: AgentProcess, folder: Path, *command: str) -> Iterator["subprocess.Popen[str]"]:
    env = {**os.environ, "TRAINCTL_CONNECT": agent.address}
    words = [*EXEC, "--name", "guest", "--", *command]
    process = subprocess.Popen(
        words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def run_of(agent: AgentProcess) -> RunSummary | None:
    with agent.client() as client:
        return next((run for run in client.ask(RunsRequest).runs if run.name == "guest"), None)


def ended(agent: AgentProcess) -> RunSummary:
    run = run_of(agent)
    assert run is not None and run.state != "running"
    return run


def steps_of(agent: AgentProcess) -> tuple[StepCommitted, ...]:
    run = run_of(agent)
    assert run is not None
    with agent.client() as client:
        return client.ask(StepsRequest, run.run, after_step=0, limit=500).steps


def log_of(agent: AgentProcess, run: str) -> str:
    with agent.client() as client:
        return client.ask(LogRequest, run, 0, 0, 65536).text


def same(first: "subprocess.CompletedProcess[str]", second: "subprocess.CompletedProcess[str]") -> None:
    assert (first.returncode, first.stdout, first.stderr) == (second.returncode, second.stdout, second.stderr)


def test_a_torch_loop_trains_as_without_and_its_losses_are_the_runs(agent: AgentProcess, tmp_path: Path) -> None:
    command = [*script(tmp_path, LOOP, TENSORBOARD), "30", "0"]
    without, done = bare(tmp_path, *command), watched(agent, tmp_path, *command)
    same(done, without)
    run = ended(agent)
    assert (run.state, run.step, run.kind) == ("finished", 30, "exec")
    assert log_of(agent, run.run) == without.stdout
    steps = steps_of(agent)
    printed = [float(line.split()[1]) for line in without.stdout.splitlines()[:-1]]
    assert [step.loss for step in steps] == pytest.approx(printed, rel=1e-6)
    assert [step.learning_rate for step in steps] == [0.1] * 10 + [0.05] * 10 + [0.025] * 10
    assert all("user:weight" in step.values for step in steps)


def test_a_torch_loop_takes_set_lr_pause_resume_and_stop(agent: AgentProcess, tmp_path: Path) -> None:
    with begun(agent, tmp_path, *script(tmp_path, LOOP), "100000", "0.02") as process:
        until(lambda: (run := run_of(agent)) and run.step >= 3, 120, "steps")
        run = run_of(agent)
        assert run is not None
        with agent.client() as client:
            changed = client.send("set-lr", {"value": 0.0123, "schedule": "set"}, run=run.run)
            assert changed.state == "applied", changed
            paused = client.send("pause", {}, run=run.run)
            assert paused.state == "applied"
            until(lambda: client.ask(SnapshotRequest, 0, run.run).run.state == "paused", 60, "the pause")
            assert client.ask(SnapshotRequest, 0, run.run).run.step == paused.step
            assert client.send("resume", {}, run=run.run).state == "applied"
            until(lambda: client.ask(SnapshotRequest, 0, run.run).run.step > (paused.step or 0) + 3, 60, "more steps")
            refused = client.send("stop", {}, run=run.run)
            assert refused.state == "rejected" and "checkpoint=false" in refused.reason
            stopped = client.send("stop", {"checkpoint": False}, run=run.run)
            assert stopped.state == "applied"
        out, err = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 128 + signal.SIGINT
        assert err.endswith("KeyboardInterrupt\n")
    steps = {step.step: step for step in steps_of(agent)}
    assert changed.step is not None and steps[changed.step].learning_rate == 0.0123
    assert steps[changed.step - 1].learning_rate != 0.0123
    assert max(steps) == stopped.step == len(out.splitlines())
    assert ended(agent).state == "stopped"


def test_several_optimizers_refuse_set_lr_and_say_so(agent: AgentProcess, tmp_path: Path) -> None:
    text = """
    import time, torch
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.01) for weight in weights]
    while True:
        (weights[0] * weights[1]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        time.sleep(0.02)
    """
    with begun(agent, tmp_path, *script(tmp_path, textwrap.dedent(text))) as process:
        until(lambda: (run := run_of(agent)) and run.step >= 3, 120, "steps")
        run = run_of(agent)
        assert run is not None
        with agent.client() as client:
            until(lambda: "several optimizers" in dict(client.ask(SnapshotRequest, 0, run.run).run.verbs)["set-lr"])
            assert client.send("stop", {"checkpoint": False}, run=run.run).state == "applied"
        process.communicate(timeout=HANG_SECONDS)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loaders_with_workers_leave_one_loop(agent: AgentProcess, tmp_path: Path, method: str) -> None:
    command = [*script(tmp_path, LOOP), "16", "0", method]
    same(watched(agent, tmp_path, *command), bare(tmp_path, *command))
    assert ended(agent).step == 16
    assert [step.step for step in steps_of(agent)] == [*range(1, 17)]
    with agent.client() as client:
        assert sum("attached" in event.text for event in events_of(client, ended(agent).run)) <= 1


def test_loops_of_one_command_are_runs_of_their_own_while_they_overlap(agent: AgentProcess, tmp_path: Path) -> None:
    python, path = script(tmp_path, LOOP)
    loops = f"{python} {path} 60 0.1 & {python} {path} 60 0.1 & wait; {python} {path} 5 0"
    assert watched(agent, tmp_path, "sh", "-c", loops).returncode == 0
    with agent.client() as client:
        runs = client.ask(RunsRequest).runs
    assert sorted((run.kind, run.step, run.state) for run in runs) == [
        ("exec", 65, "finished"),
        ("guest", 60, "finished"),
    ]


def test_a_compiled_step_runs_as_without(agent: AgentProcess, tmp_path: Path) -> None:
    text = """
    import torch
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    @torch.compile(backend="eager")
    def step():
        optimizer.step()
    for _ in range(5):
        (weight ** 2).sum().backward()
        step()
    print(weight.sum().item())
    """
    command = script(tmp_path, textwrap.dedent(text))
    done, without = watched(agent, tmp_path, *command), bare(tmp_path, *command)
    assert (done.returncode, done.stdout) == (without.returncode, without.stdout) == (0, done.stdout)


def test_torchrun_trains_as_without(agent: AgentProcess, tmp_path: Path) -> None:
    text = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(model.module.weight.sum().item())
    dist.destroy_process_group()
    """
    _, path = script(tmp_path, textwrap.dedent(text))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path]
    done, without = watched(agent, tmp_path, *command, OMP_NUM_THREADS="1"), bare(tmp_path, *command)
    assert (done.returncode, done.stdout) == (without.returncode, without.stdout) == (0, done.stdout)
    assert ended(agent).step == 10


def test_a_crash_has_its_last_lines_in_an_event(agent: AgentProcess, tmp_path: Path) -> None:
    command = script(tmp_path, "for at in range(50):\n    print('line', at)\nraise ValueError('nothing left')\n")
    without, done = bare(tmp_path, *command), watched(agent, tmp_path, *command)
    same(done, without)
    run = ended(agent)
    assert (run.state, done.returncode) == ("failed", 1)
    with agent.client() as client:
        (event,) = [
            event for event in events_of(client, run.run) if "exit status 1" in event.text and "line" in event.text
        ]
    assert event.severity == "error"
    assert "line 49" in event.text and "nothing left" in event.text and "line 20" not in event.text
    assert log_of(agent, run.run).count("\n") == 50 + without.stderr.count("\n")


def test_an_isolated_python_and_one_without_our_packages_have_log_and_exit_status(
    agent: AgentProcess, tmp_path: Path
) -> None:
    for python in (
        [sys.executable, "-I"],
        ["/usr/bin/python3"] if Path("/usr/bin/python3").exists() else [sys.executable],
    ):
        command = [*python, "-c", "print('here'); raise SystemExit(6)"]
        done = watched(agent, tmp_path, *command)
        same(done, bare(tmp_path, *command))
        run = ended(agent)
        assert (run.state, run.step, log_of(agent, run.run)) == ("failed", 0, "here\n")


def test_stop_of_a_command_without_a_loop_is_sigterm(agent: AgentProcess, tmp_path: Path) -> None:
    with begun(agent, tmp_path, "sh", "-c", "trap 'echo bye; exit 0' TERM; while :; do sleep 0.05; done") as process:
        until(lambda: run_of(agent), 60, "the run")
        run = run_of(agent)
        assert run is not None
        with agent.client() as client:
            refused = client.send("pause", {}, run=run.run)
            assert refused.state == "rejected" and "no training loop" in refused.reason
            assert client.send("stop", {}, run=run.run).state == "applied"
        assert process.communicate(timeout=HANG_SECONDS)[0] == "bye\n"
    assert ended(agent).state in ("finished", "stopped")


def test_a_killed_exec_fails_its_run(agent: AgentProcess, tmp_path: Path) -> None:
    with begun(agent, tmp_path, "sh", "-c", "echo $$; exec sleep 1000") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        until(lambda: (run := run_of(agent)) and run.state == "failed", 60, "the run to fail")
        psutil.Process(pid).kill()


def test_detached_it_outlives_its_caller_and_has_its_log(agent: AgentProcess, tmp_path: Path) -> None:
    code = "import sys, time; print('begun', flush=True); sys.stdin.read(); time.sleep(0.5); print('over'); sys.exit(3)"
    done = watched(agent, tmp_path, sys.executable, "-c", code, options=("--detach",))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"guest-\d{8}-\d{6}-[0-9a-f]{4}\n", done.stdout)
    run = run_of(agent)
    assert run is not None and run.run == done.stdout.strip()
    until(lambda: run_of(agent).state == "failed", 60, "its end")  # type: ignore[union-attr]
    assert log_of(agent, run.run) == "begun\nover\n"
    with agent.client() as client:
        assert any("exit status 3" in event.text for event in events_of(client, run.run))
    known = json.loads((Path(run.directory) / "command.process.json").read_text())
    until(lambda: not psutil.pid_exists(known["keeper_pid"]), 60, "the shim to end")


@pytest.mark.parametrize("options", [(), ("--detach",)])
@pytest.mark.parametrize(("content", "status"), [("#!/no/interpreter\n", 127), ("\0", 126)])
def test_a_command_that_cannot_start_has_a_shells_status_and_fails_its_run(
    options: tuple[str, ...], content: str, status: int, agent: AgentProcess, tmp_path: Path
) -> None:
    program = tmp_path / "train"
    program.write_text(content, "utf-8")
    program.chmod(0o755)
    done = watched(agent, tmp_path, str(program), options=options)
    assert (done.returncode, done.stdout) == (status, "")
    assert until(lambda: run_of(agent) and ended(agent)).state == "failed"


def test_output_that_is_lost_is_said_and_no_success(agent: AgentProcess, tmp_path: Path) -> None:
    words = [*EXEC, "--name", "guest", "--", "sh", "-c", "echo all of it"]
    env = {**os.environ, "TRAINCTL_CONNECT": agent.address}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(words, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert until(lambda: ended(agent)).state == "finished"


def test_env_gives_variables_by_which_a_loop_finds_its_run(agent: AgentProcess, tmp_path: Path) -> None:
    env = {**os.environ, "TRAINCTL_CONNECT": agent.address}
    said = subprocess.run([*EXEC, "--name", "guest", "--env"], env=env, capture_output=True, text=True, check=True)
    variables = dict(line.split("=", 1) for line in said.stdout.splitlines())
    done = subprocess.run(
        [*script(tmp_path, LOOP), "5", "0"], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    run = ended(agent)
    assert (run.run, run.state, run.step) == (variables["TRAINCTL_GUEST_RUN"], "finished", 5)


def test_metrics_of_a_file_are_steps(agent: AgentProcess, tmp_path: Path) -> None:
    text = """
    import json
    with open("log.jsonl", "w") as file:
        for step in range(1, 21):
            print(json.dumps({"step": step, "loss": 1 / step, "lr": 0.5, "acc": step}), file=file)
    """
    command = script(tmp_path, textwrap.dedent(text))
    assert watched(agent, tmp_path, *command, options=("--metrics", "log.jsonl")).returncode == 0
    steps = steps_of(agent)
    assert [(step.step, step.loss, step.learning_rate) for step in steps] == [(at, 1 / at, 0.5) for at in range(1, 21)]
    assert steps[4].values["user:acc"] == 5.0


def test_without_an_agent_it_runs_and_a_later_agent_records_it(tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path / "state")
    command = [*script(tmp_path, LOOP), "12", "0"]
    done = watched(agent, tmp_path, *command, TRAINCTL_STATE=str(tmp_path / "state"))
    without = bare(tmp_path, *command)
    assert (done.returncode, done.stdout) == (0, without.stdout)
    assert done.stderr.startswith("trainctl: no agent runs on this machine") and done.stderr.count("\n") == 1
    agent.start()
    try:
        until(lambda: (run := run_of(agent)) and run.state == "finished" and run.step == 12, 60, "the run")
    finally:
        agent.clean_up()
