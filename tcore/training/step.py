"""One step of training: losses and gradients, clipping, AdamW, then the teacher and its centers."""

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tcore import methods
from tcore.config import Config
from tcore.data import render
from tcore.data.loader import render_batch
from tcore.data.source import RawBatch
from tcore.device import choose_device, choose_dtype, peak_memory_gib
from tcore.errors import DivergedError, InputError
from tcore.methods.health import Health
from tcore.methods.method import HEALTH_ROWS, Method, drop_path_seed
from tcore.model.fused import PLAIN
from tcore.training import distributed
from tcore.training.graphs import CudaRecorder, StepGraphs, split
from tcore.training.guard import reached
from tcore.training.optim import Optimizer, StepValues
from tcore.training.wrapping import before_last, compile_method, compile_render, compiles, replicate, shard

Losses = dict[str, Tensor]
Samples = list[dict[str, Tensor]]


class VerifyError(InputError):
    """A step that was computed twice gave two results."""

    exit_code = 1


class Trainer:
    """Method, optimizer and device of a run; `step` is one step of training."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = choose_device(config.runtime.device)
        self.dtype = choose_dtype(config.optim.precision, self.device)
        self.world = distributed.join(config.runtime.device, config.runtime.patience)
        self.method: Method = methods.build(config).to(self.device)
        self.method.peers = distributed.peers()
        self.method.health_rows = max(1, HEALTH_ROWS // self.world.size)
        self.render = render.PLAIN
        self.sharded = sharded = config.runtime.sharding == "shard" and not distributed.alone()
        if compiles(config.runtime.compile, self.device):
            if config.runtime.verify_every is not None and self.device.type == "cuda":
                raise InputError(
                    "runtime.verify_every needs runtime.compile=off on a GPU: compiled kernels do not add up "
                    "in the same order twice."
                )
            fixed = self.method.fixed_shapes(self.own_videos, config.optim.samples)
            compile_method(self.method, fixed_shapes=fixed, sharded=sharded)
            self.render = compile_render(self.device)
        wrap = shard if sharded else replicate
        self.losses = wrap(self.method)
        self.optimizer = Optimizer(self.method.parts(), config.optim, config.vit.depth)
        self.generator = torch.Generator(self.device)
        self.graphs = (
            StepGraphs(self.method, self._backward, CudaRecorder(self.generator)) if self._records() else None
        )
        self.beside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.timing = Timing(self.device)
        self.whole = True
        """Whether weights, moments, teacher and centers are all of the same step."""

    def _records(self) -> bool:
        """Whether steps are recorded as CUDA graphs: compiled ones, computed in one part by one process."""
        runtime, alone = self.config.runtime, distributed.alone() and self.config.optim.accumulate == 1
        wanted = runtime.graphs == "auto" and compiles(runtime.compile, self.device)
        # Without Triton, the losses send numbers to the device, which cannot be recorded.
        return wanted and alone and self.device.type == "cuda" and self.method.kernels is not PLAIN

    @property
    def own_videos(self) -> int:
        """Samples that this process computes at a time."""
        return self.config.optim.samples // (self.config.optim.accumulate * self.world.size)

    def step(self, parts: Iterator[RawBatch], step: int, values: StepValues, look: bool = False) -> "Outcome":
        """Make one step; a GPU may still be computing it when this returns."""
        self.method.observing = look
        self.timing = Timing(self.device, self.timing)
        reached(step + 1)
        bad: list[str] = []
        every = self.config.runtime.verify_every
        if every is not None and (step + 1) % every == 0:
            losses, samples = self._twice(list(self._read(parts, bad)), step, values)
        else:
            losses, samples = self._gradients(self._read(parts, bad), step, values)
        # What each process has is its share of a sum.
        distributed.add_up([*losses.values(), *self.method.sums()])
        norms = self.optimizer.clip()
        outcome = Outcome(step, losses, norms, values, self.config.optim.samples, self.method, samples)
        outcome.bad, outcome.timing = tuple(bad), self.timing
        if self.device.type == "cpu":
            outcome.check()  # the numbers are there: stop before the update
        self.whole = False
        self.optimizer.step(values)
        self.method.finish_step(values.own)
        self.whole = True
        self.timing.end()
        return outcome

    def _read(self, parts: Iterator[RawBatch], bad: list[str]) -> Iterator[RawBatch]:
        """The parts of a step, as they arrive; `bad` collects why samples could not be read."""
        for _ in range(self.config.optim.accumulate):
            with self.timing.waiting():
                raw = next(parts)
            reached()
            bad += raw.bad
            yield raw

    def _gradients(self, parts: Iterable[RawBatch], step: int, values: StepValues) -> tuple[Losses, Samples]:
        """Losses and health samples of a step; its gradients are added up in the parameters."""
        losses: Losses = {}
        samples: Samples = []
        for part, raw in enumerate(parts):
            self.generator.manual_seed(drop_path_seed(self.config.seed, step, part, self.world.rank))
            last = part == self.config.optim.accumulate - 1
            with nullcontext() if last else before_last(self.losses):
                found = self._losses(self._render(raw), values)
            for name, value in found.items():
                losses[name] = losses[name] + value if name in losses else value
            if self.method.observing:
                samples.append(self.method.health_sample)
        return losses, samples

    def _twice(self, parts: list[RawBatch], step: int, values: StepValues) -> tuple[Losses, Samples]:
        """The same, computed twice; the run stops where a bit differs."""
        found: list[dict[str, Tensor]] = []
        waiting = [x.clone() for x in self.method.sums()]
        for _ in range(2):
            self.optimizer.adamw.zero_grad()
            for x, before in zip(self.method.sums(), waiting, strict=True):
                x.copy_(before)
            with deterministic() if self.device.type == "cuda" else nullcontext():
                losses, samples = self._gradients(parts, step, values)
            found.append({f"loss {name}": x for name, x in losses.items()})
            for name, p in self.method.named_parameters():
                if p.grad is not None:
                    found[-1][f"gradient of {name}"] = distributed.plain(p.grad).clone()
        first, again = found
        other = next((name for name in first if not torch.equal(first[name], again[name])), None)
        distributed.together(lambda: _refuse(other, step))
        return losses, samples

    def _render(self, raw: RawBatch) -> Any:
        """A part of the step with its pixels; a GPU makes them while it still works on the step before."""
        with torch.cuda.stream(self.beside):  # None: here
            batch = render_batch(raw, self.device, self.render)
            if self._replays():
                with self._autocast():  # crops are rounded as the encoder would
                    batch = self.method.in_fixed_shapes(batch)
        if self.beside is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self.beside)
            for tensor in split(batch)[0]:
                tensor.record_stream(now)  # the memory must not be taken again before the step has read it
        return batch

    def _replays(self) -> bool:
        """Whether this step is one of a graph."""
        return self.graphs is not None and (not self.method.observing or self.method.graphed_health)

    def _losses(self, batch: Any, values: StepValues) -> Losses:
        """Losses of a part of the step; their gradients are added up, or are those of a graph."""
        if self.graphs is None or not self._replays():
            return self._backward(batch, values.own)
        return self.graphs(batch, values.own)

    def _backward(self, batch: Any, values: Mapping[str, Any]) -> Losses:
        """The same, kernel by kernel."""
        with self._autocast():
            losses = self.losses(batch, values, self.generator)
        total = self.method.total(losses)
        # Gradients are averaged over the processes, but they are shares of a sum.
        (self.world.size * total).backward()
        return {name: value.detach() for name, value in {"total": total, **losses}.items()}

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        # A cast that two passes share would hand its gradient over after the first pass' share was collected.
        return torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=not self.sharded)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that add up in the same order every time, where PyTorch has them."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def _refuse(part: str | None, step: int) -> None:
    """Stop the run if a part of a step was different the second time."""
    if part is not None:
        raise VerifyError(
            f"step {step + 1} was computed twice, and the {part} differs: faulty memory or hardware, or a "
            "kernel that is not deterministic; resume on another machine, or without --runtime.verify-every."
        )


class Outcome:
    """The outcome of a step; its numbers are copied from the device while the next step runs."""

    def __init__(
        self,
        step: int,
        losses: Mapping[str, Tensor],
        norms: Mapping[str, Tensor],
        values: StepValues,
        batch: int,
        method: Method,
        samples: list[dict[str, Tensor]],
    ) -> None:
        self.step = step
        self.timing: Timing
        self.bad: tuple[str, ...] = ()  # why samples could not be read and were replaced
        self._all_bad: tuple[str, ...] | None = None
        self._batch, self._values, self._method, self._samples = batch, values, method, samples
        self._norms = {f"gradient_norm_{part}": part for part in norms}
        self._names = [*losses, *self._norms]
        numbers = torch.stack([*losses.values(), *norms.values()])
        self._device = numbers.device
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if numbers.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def check(self) -> dict[str, float]:
        """The numbers of the step; one that is not finite stops the run."""
        if self._arrived is not None:
            self._arrived.synchronize()
        named = dict(zip(self._names, self._numbers.tolist(), strict=True))
        bad = {name: x for name, x in named.items() if not math.isfinite(x) and name != "total"}
        # A non-finite loss makes all gradients non-finite: then only losses are reported.
        losses = {f"loss {name}": x for name, x in bad.items() if name not in self._norms}
        norms = {f"gradient norm of {self._norms[name]}": x for name, x in bad.items() if name in self._norms}
        if bad:
            said = ", ".join(f"{name}={x}" for name, x in (losses or norms).items())
            raise DivergedError(f"{said} at step {self.step + 1}: stopped, nothing of it was saved.")
        return named

    def metrics(self) -> dict[str, Any]:
        """Everything that is logged of the step."""
        named = self.check()
        seconds, waited, memory = distributed.largest([*self.timing.read(), peak_memory_gib(self._device)])
        return {
            **named,
            **self._values.logged(),
            "samples_per_second": self._batch / seconds,
            "data_wait": waited / seconds,
            "bad_samples": len(self.all_bad()),
            "memory_gib": memory,
        }

    def all_bad(self) -> tuple[str, ...]:
        """Why samples of the whole step could not be read; a collective, carried out once."""
        if self._all_bad is None:
            self._all_bad = tuple(line for share in distributed.gather_objects(self.bad) for line in share)
        return self._all_bad

    def health(self) -> Health | None:
        """Health figures, where the step was observed."""
        if not self._samples:
            return None
        rows = {name: torch.cat([sample[name] for sample in self._samples]) for name in self._samples[0]}
        everywhere = {name: distributed.all_rows(x) for name, x in rows.items()}
        return self._method.health(everywhere, self.check())


class Timing:
    """How long a step took, and how much of it was spent waiting for data, in seconds.

    On a GPU both are measured by events: time that the host waits while the GPU has work is not lost.
    """

    def __init__(self, device: torch.device, before: "Timing | None" = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._started, self._ended, self.waited = time.perf_counter(), 0.0, 0.0
        self._end_before: Any = self._event() if before is None else before._end
        self._begin: Any = self._end_before
        self._end: Any = self._end_before

    def _event(self) -> Any:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a with-block as waiting; the GPU begins the step after the first one."""
        entered = time.perf_counter()
        yield
        self.waited += time.perf_counter() - entered
        if self._begin is self._end_before:
            self._begin = self._event()

    def end(self) -> None:
        """The step is done, or all of it is queued on the GPU."""
        self._ended, self._end = time.perf_counter(), self._event()

    def read(self) -> tuple[float, float]:
        """Seconds, and seconds waited."""
        if not self._on_gpu:
            return self._ended - self._started, self.waited
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1000 + self.idle(), min(self.waited, self.idle())

    def idle(self) -> float:
        """Seconds for which a GPU had nothing to do between the step before and this one."""
        return float(self._end_before.elapsed_time(self._begin)) / 1000 if self._on_gpu else 0.0
