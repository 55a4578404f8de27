"""Forward and backward pass of a step as a CUDA graph: recorded once, then replayed in a single call.

A small network on a GPU waits for Python, which starts thousands of kernels one after the other. A graph
starts them all at once. It reads its inputs from fixed places in memory, and whatever was a Python number
when it was recorded stays that number: shapes and such numbers are the key that a graph is found by.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tcore.errors import InputError
from tcore.methods.method import Method

Losses = dict[str, Tensor]
Backward = Callable[[Any, Mapping[str, Any]], Losses]
EAGER_STEPS = 2  # before anything is recorded: these compile the kernels


class RecordingError(InputError):
    """A step could not be recorded."""

    exit_code = 1


class Recorder(Protocol):
    """Records work that is done later, again and again."""

    def __call__(self, work: Callable[[], Losses]) -> tuple[Losses, Callable[[], object]]:
        """What the work returned, in memory that every replay fills anew; and the replay."""


class CudaRecorder:
    """Records CUDA graphs. All share one pool of memory, so what they return is lost in the next replay."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Losses]) -> tuple[Losses, Callable[[], object]]:
        """Record, without carrying it out."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        # Other threads may go on with what a recording forbids its own one: they pin the next batch.
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                found = work()
        except RuntimeError as error:
            raise RecordingError(
                f"recording a step as a CUDA graph failed ({str(error).splitlines()[0]}): free memory of the "
                "GPU, or add --runtime.graphs off."
            ) from error

        def replay() -> None:
            # Dropout takes no generator: it draws from that of the device.
            torch.cuda.manual_seed(self._generator.initial_seed())
            graph.replay()

        return found, replay


@dataclass
class Recorded:
    """A recorded step, and where it leaves what it computes."""

    replay: Callable[[], object]
    losses: Losses
    health: dict[str, Tensor]
    gradients: list[Tensor | None]


class StepGraphs:
    """Losses and gradients of steps, by graphs where one is recorded."""

    def __init__(self, method: Method, backward: Backward, recorder: Recorder) -> None:
        self.method, self.backward, self.recorder = method, backward, recorder
        self._parameters = [p for p in method.parameters() if p.requires_grad]
        self._key: Hashable = None
        self._inputs: list[Tensor] = []
        self._values: dict[str, Tensor] = {}
        self._recorded: dict[Hashable, Recorded] = {}
        self._seen: set[Hashable] = set()
        self._eager_steps = 0

    def __call__(self, batch: Any, values: Mapping[str, float]) -> Losses:
        """Losses of a step from its batch in fixed shapes; its gradients are in the parameters."""
        tensors, rest = split(batch)
        if rest != self._key:  # other shapes: what was recorded is of no more use
            self._key, self._inputs = rest, [torch.empty_like(x) for x in tensors]
            self._recorded, self._seen = {}, set()
        torch._foreach_copy_(self._inputs, tensors)
        batch, own = join(batch, iter(self._inputs)), self._live(values)
        del tensors  # a step needs the memory
        variant = (self.method.observing, tuple(values.get(name) for name in self.method.switches))
        if variant not in self._recorded:
            if variant not in self._seen or self._eager_steps < EAGER_STEPS:
                self._seen.add(variant)
                self._eager_steps += 1
                return self.backward(batch, own)
            self._recorded[variant] = self._record(batch, own)
        recorded = self._recorded[variant]
        recorded.replay()
        for parameter, gradient in zip(self._parameters, recorded.gradients, strict=True):
            parameter.grad = gradient
        # Read later than the next replay, which may use the same memory.
        self.method.health_sample = {name: x.clone() for name, x in recorded.health.items()}
        return {name: x.clone() for name, x in recorded.losses.items()}

    def _live(self, values: Mapping[str, float]) -> dict[str, Any]:
        """The values of a step, those that change from step to step in fixed places."""
        for name in self.method.live:
            if name in values:
                if name not in self._values:
                    self._values[name] = self._parameters[0].new_zeros((), dtype=torch.float64)
                self._values[name].fill_(values[name])
        return {**values, **self._values}

    def _record(self, batch: Any, values: Mapping[str, Any]) -> Recorded:
        """Record a step; gradients get memory of their own."""
        for parameter in self._parameters:
            parameter.grad = None
        losses, replay = self.recorder(lambda: self.backward(batch, values))
        gradients = [p.grad for p in self._parameters]
        return Recorded(
            replay, losses, dict(self.method.health_sample) if self.method.observing else {}, gradients
        )


def split(batch: Any) -> tuple[list[Tensor], Hashable]:
    """The tensors of a batch, and what a graph takes for granted: their shapes, and all other numbers.

    >>> from tcore.methods.reconstruction import PixelBatch
    >>> place = torch.zeros(2, 1, dtype=torch.int64)
    >>> tensors, _ = split(PixelBatch(torch.zeros(2, 3, 1, 8, 8), place, place, samples=2))
    >>> len(tensors)
    3
    """
    tensors: list[Tensor] = []
    rest: list[Hashable] = [type(batch).__name__]
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            tensors.append(value)
            rest.append((value.shape, value.stride(), value.dtype))
        elif is_dataclass(value):
            inner, about = split(value)
            tensors += inner
            rest.append(about)
        else:
            rest.append(value)
    return tensors, tuple(rest)


def join(batch: Any, tensors: Iterator[Tensor]) -> Any:
    """A batch with other tensors, in the order of `split`."""
    changed: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = next(tensors)
        elif is_dataclass(value):
            changed[field.name] = join(value, tensors)
    return replace(batch, **changed)
