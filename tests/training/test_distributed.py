"""Several processes train as one: the same losses, the same gradients, the same data after a resume."""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tcore import InputError, load_encoder
from tcore.device import World, world
from tcore.evaluation.trajectory import read_checkpoints
from tcore.methods import build_source
from tcore.model.losses import ALONE
from tcore.training import distributed
from tcore.training.loop import open_store, resolve
from tests.evaluation.layouts import heldout_videos, write_davis
from tests.runs import metrics
from tests.tiny import TINY, flags_of, tiny
from tests.training.jobs import ENVIRONMENT, ROOT, SAME, work, work_together

LOSSES = ("total", "dino", "past_teacher", "future_teacher", "past_future", "koleo")
NORMS = ("gradient_norm_backbone", "gradient_norm_head", "gradient_norm_match")
VARIANTS: dict[str, dict[str, Any]] = {
    "centering": {**SAME, "teacher__targets": "centering"},
    "sinkhorn in parts": {
        **SAME,
        "teacher__targets": "sinkhorn",
        "optim__accumulate": 2,
        "optim__steps": 2,
    },
}
KINDS = ("replicate", "shard")
PAIRS = [("centering", "replicate"), ("centering", "shard"), ("sinkhorn in parts", "shard")]
BF16: dict[str, Any] = {**VARIANTS["centering"], "optim__precision": "bf16", "optim__steps": 1}
MIDDLE = 2
STOPPED = [(MIDDLE, "stop", rank) for rank in range(4)]


def assert_same_losses(run: Path, alone: Path, steps: int | None = None) -> None:
    ours, theirs = metrics(run), metrics(alone)
    steps = steps or len(theirs)
    assert [line["step"] for line in ours] == list(range(1, steps + 1))
    for a, b in zip(ours, theirs[:steps], strict=True):
        for name in (*LOSSES, *NORMS):
            assert a[name] == pytest.approx(b[name], rel=1e-5), (name, a["step"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on one and on two processes, and some that stopped in the middle."""
    root = tmp_path_factory.mktemp("runs")
    for name, changes in VARIANTS.items():
        work(root / f"1-{name}", gradients=True, **changes)
    work(root / "1-bf16", **BF16)
    work(root / "1-then-2-shards", faults=STOPPED, **VARIANTS["centering"])
    jobs: list[dict[str, Any]] = []
    davis = write_davis(root / "davis", heldout_videos(1, num_frames=3, size=32))
    for name, kind in PAIRS:
        scored = {"davis": str(davis)} if (name, kind) == ("centering", "shard") else {}
        jobs.append(job(root / f"2-{name}-{kind}", kind, gradients=True, **scored, **VARIANTS[name]))
    jobs.append(job(root / "2-bf16-shard", "shard", **BF16))
    jobs.append(job(root / "1-then-2-shards", "shard", **VARIANTS["centering"]))
    jobs.append(job(root / "2-shards-middle", "shard", faults=STOPPED, **VARIANTS["centering"]))
    work_together(2, jobs)
    return root


def job(run: Path, kind: str, **changes: Any) -> dict[str, Any]:
    return {"run": str(run), "runtime__sharding": kind, **changes}


def test_one_of_two_processes_scores_while_the_other_waits(runs: Path) -> None:
    run = runs / "2-centering-shard"  # which has the losses and gradients of one process that is not scored
    rows = read_checkpoints(run / "checkpoints" / "checkpoints.json")
    assert list(rows) == [2, 3]
    assert rows[3]["weights"] == load_encoder(run).fingerprint()
    assert load_encoder(run / "encoder-best.safetensors").patch_size == 8


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_two_processes_have_the_losses_and_gradients_of_one(runs: Path, name: str, kind: str) -> None:
    assert_same_losses(runs / f"2-{name}-{kind}", runs / f"1-{name}")
    alone = torch.load(runs / f"1-{name}.pt", weights_only=True)
    found = torch.load(runs / f"2-{name}-{kind}.pt", weights_only=True)
    assert found.keys() == alone.keys()
    assert any(x.abs().max() > 0 for x in alone.values())
    for parameter, gradient in alone.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            found[parameter], gradient, rtol=1e-4, atol=1e-4 * scale + 1e-9, msg=parameter
        )


def test_two_processes_have_the_losses_and_gradient_norms_of_one_in_bf16(runs: Path) -> None:
    # Replicas compute what one process computes, whatever the type; shards cast for each pass anew.
    for a, b in zip(metrics(runs / "2-bf16-shard"), metrics(runs / "1-bf16"), strict=True):
        for name in (*LOSSES, *NORMS):
            assert a[name] == pytest.approx(b[name], rel=2e-2), (name, a["step"])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("processes", "way"),
    [(2, ""), (2, "together"), (1, "exchanging")],
    ids=["forked", "torchrun", "with itself"],
)
def test_processes_train_as_one_however_they_are_started(
    runs: Path, tmp_path: Path, kind: str, processes: int, way: str
) -> None:
    name = "centering" if way else "sinkhorn in parts"
    work_together(processes, [job(tmp_path / "run", kind, **VARIANTS[name])], *([way] if way else []))
    assert_same_losses(tmp_path / "run", runs / f"1-{name}")


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_two_processes_is_the_plain_file_of_one(runs: Path, kind: str) -> None:
    files = [runs / name / "checkpoint.pt" for name in ("1-centering", f"2-centering-{kind}")]
    one, two = (torch.load(file, weights_only=True) for file in files)
    assert one.keys() == two.keys()
    assert one["model"].keys() == two["model"].keys()
    for name, value in one["model"].items():
        # AdamW turns the sign of a gradient that is nothing but rounding into a small step.
        torch.testing.assert_close(two["model"][name], value, rtol=1e-3, atol=1e-4)
    assert one["optimizer"]["state"].keys() == two["optimizer"]["state"].keys()
    for index, moments in one["optimizer"]["state"].items():
        assert two["optimizer"]["state"][index]["exp_avg"].shape == moments["exp_avg"].shape
    encoder = load_file(runs / f"2-centering-{kind}" / "encoder.safetensors")
    kept = load_file(runs / f"2-centering-{kind}" / "encoders" / "step-000003.safetensors")
    for name, value in encoder.items():
        assert torch.equal(value, two["model"][f"teacher.backbone.{name}"])
        assert torch.equal(value, kept[name])


def test_health_is_that_of_all_processes(runs: Path) -> None:
    # 16 crops in all, 8 in each process: all of them are looked at.
    for kind in KINDS:
        for a, b in zip(metrics(runs / f"2-centering-{kind}"), metrics(runs / "1-centering"), strict=True):
            assert ("health" in a) == ("health" in b)
            for name in ("frame_rank", "prototypes_used") if "health" in a else ():
                assert a["health"][name] == pytest.approx(b["health"][name], rel=1e-3)


def test_a_run_goes_on_with_more_and_with_fewer_processes(runs: Path) -> None:
    assert_same_losses(runs / "1-then-2-shards", runs / "1-centering")
    run = runs / "2-shards-middle"
    assert_same_losses(run, runs / "1-centering", steps=MIDDLE)
    work(run, **VARIANTS["centering"])
    assert_same_losses(run, runs / "1-centering")


def torchrun(*words: str) -> "subprocess.CompletedProcess[str]":
    """A command of tcore on two processes of this machine."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tcore"]
    return subprocess.run(
        [sys.executable, *launch, *words],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.long
def test_an_error_reaches_all_processes_and_is_said_once(tmp_path: Path) -> None:
    done = torchrun("--", "train", "quickstart", "--optim.batch", "5", "--run", str(tmp_path / "run"))
    assert done.returncode != 0
    assert done.stderr.count("tcore: error") == 1
    assert "optim.batch=5 cannot be shared equally by 2 processes" in done.stderr
    assert "cli.py" not in done.stderr  # torchrun shows its own stack, we do not
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_out_what_one_would_see(processes: int, accumulate: int) -> None:
    config = tiny(optim__batch=8, optim__accumulate=accumulate, rendered__videos=11)
    store = open_store(config, None)
    size = 8 // accumulate
    for index in (0, 3):
        whole = build_source(store, config)[index]
        parts = [build_source(store, config, World(rank, processes))[index] for rank in range(processes)]
        masks = [part.mask.unflatten(0, (2, size // processes)) for part in parts]
        assert torch.equal(torch.cat(masks, dim=1).flatten(0, 1), whole.mask)
        assert torch.equal(torch.cat([part.frames for part in parts]), whole.frames)
        assert {part.counts for part in parts} == {whole.counts}
        boxes = [part.plans["global"].box.reshape(2, size // processes, -1) for part in parts]
        assert (torch.cat([torch.from_numpy(b) for b in boxes], dim=1).numpy().reshape(
            whole.plans["global"].box.shape) == whole.plans["global"].box).all()  # fmt: skip


def test_a_batch_that_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(optim__batch=12, optim__accumulate=2)
    assert resolve(config).optim.batch == 12
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert world() == World(rank=1, size=4, here=2, place=1)
    with pytest.raises(InputError, match=r"optim.batch=12 .* 4 processes in optim.accumulate=2 .* of 8"):
        resolve(config)


def test_on_one_process_collectives_change_nothing() -> None:
    x = torch.randn(3, 2)
    before = x.clone()
    distributed.add_up([x])
    assert torch.equal(x, before)
    assert distributed.all_rows(x) is x
    assert distributed.plain(x) is x
    assert distributed.largest([1.0, 2.0]) == [1.0, 2.0]
    assert distributed.on_first(lambda: 3) == distributed.together(lambda: 3) == 3
    assert distributed.from_first(lambda: {"x": x})["x"] is x
    assert distributed.whole({"x": x})["x"] is x
    assert distributed.peers() == ALONE
    with pytest.raises(InputError, match="as it is"):
        distributed.together(lambda: (_ for _ in ()).throw(InputError("as it is")))


@pytest.mark.long
def test_any_number_of_processes_goes_on_with_the_run_of_any_other(runs: Path, tmp_path: Path) -> None:
    ways = [(1, "replicate"), *itertools.product((2, 4), KINDS)]
    by_count = {count: [kind for n, kind in ways if n == count] for count in (1, 2, 4)}

    def everywhere(jobs: dict[int, list[dict[str, Any]]]) -> None:
        for own in jobs[1]:
            work(Path(own.pop("run")), **own)
        for count in (2, 4):
            work_together(count, jobs[count])

    common = VARIANTS["centering"]
    everywhere(
        {
            count: [job(tmp_path / f"{count}-{kind}", kind, faults=STOPPED, **common) for kind in kinds]
            for count, kinds in by_count.items()
        }
    )
    after: dict[int, list[dict[str, Any]]] = {count: [] for count in by_count}
    for (count, kind), (then, other) in itertools.product(ways, ways):
        run = tmp_path / f"{count}-{kind}-{then}-{other}"
        shutil.copytree(tmp_path / f"{count}-{kind}", run)
        after[then].append(job(run, other, **common))
    everywhere(after)
    for (count, kind), (then, other) in itertools.product(ways, ways):
        assert_same_losses(tmp_path / f"{count}-{kind}-{then}-{other}", runs / "1-centering")


SHARED = {"vit.drop_path": 0, "optim.batch": 8, "optim.steps": 4, "rendered.videos": 9}
TINY_FLAGS = ["--loss.koleo-global", *flags_of(TINY | SHARED)]


@pytest.mark.long
def test_two_machines_train_as_one_process_and_only_the_first_speaks(tmp_path: Path) -> None:
    head = f"127.0.0.1:{free_port()}"
    env = ENVIRONMENT | {"PYTHON": sys.executable}
    nodes = [
        subprocess.Popen(
            [ROOT / "runs" / "torchrun.sh", "quickstart", *TINY_FLAGS, "--run", tmp_path / "run"],
            cwd=ROOT,
            env=env | {"NODES": "2", "PROCESSES": "2", "HEAD": head},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    together = "".join(said)
    assert together.count("batch 8 (2 in each of 4 processes, the whole model each)") == 1
    assert together.count("step 4/4") == 1
    assert together.count("encoder: ") == 1
    alone = ["-m", "tcore", "train", "quickstart", *TINY_FLAGS, "--run", str(tmp_path / "alone")]
    subprocess.run([sys.executable, *alone], cwd=ROOT, env=env, capture_output=True, check=True)
    assert_same_losses(tmp_path / "run", tmp_path / "alone", steps=4)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def waits(pid: int) -> bool:
    """Whether a process sleeps: a script that has started another one and waits for its end."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return shown.stdout.startswith("S")


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1])
def test_slurm_job_that_is_asked_to_leave_stops_its_processes_and_is_requeued(
    tmp_path: Path, asked: signal.Signals
) -> None:
    # Stand-ins for SLURM's commands write down how they are called.
    wait = "sleep 60 > /dev/null 2>&1 & wait"
    commands = {
        "srun": f'trap "echo stopped >> log; exit 143" TERM\necho "srun $*" >> log\n{wait}',
        "scontrol": 'echo "scontrol $*" >> log\n[[ $1 != show ]] || printf "node1\\nnode2\\n"',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    env = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(
        [ROOT / "runs" / "slurm.sh", "vits16-k400", "--run", "r"],
        cwd=tmp_path,
        env=env,
        stderr=subprocess.PIPE,
    )
    log = tmp_path / "log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "srun" in log.read_text() and waits(job.pid)):
        assert time.monotonic() < deadline, "srun was never called"
        time.sleep(0.02)
    job.send_signal(asked)
    said = job.communicate(timeout=60)[1].decode()
    assert job.returncode == 0
    assert "job 20007" in said
    assert "back into the queue" in said
    lines = log.read_text().splitlines()
    assert "--nnodes 2" in lines[1]
    assert "--rdzv-endpoint node1:20007" in lines[1]
    assert lines[1].endswith("-m tcore -- train vits16-k400 --run r")
    assert lines[2:] == ["stopped", "scontrol requeue 20007"]


@pytest.mark.long
def test_plan_tells_the_batch_of_each_process_and_of_all(tmp_path: Path) -> None:
    done = torchrun("train", "quickstart", *TINY_FLAGS, "--runtime.sharding", "shard", "--plan")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("batch 8 (4 in each of 2 processes, a share of the model each)") == 1
    assert done.stdout.count("duration ") == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_processes_have_the_losses_of_plain_ones(runs: Path, tmp_path: Path, kind: str) -> None:
    shared = VARIANTS["centering"] | {"optim__steps": 2, "vit__depth": 1}
    work_together(2, [job(tmp_path / wish, kind, runtime__compile=wish, **shared) for wish in ("on", "off")])
    for compiled, plain in zip(metrics(tmp_path / "on"), metrics(tmp_path / "off"), strict=True):
        for name in (*LOSSES, *NORMS):
            assert compiled[name] == pytest.approx(plain[name], rel=1e-3), name
