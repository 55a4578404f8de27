"""Schedules as functions of the step."""

import math
from dataclasses import dataclass


def linear(step: int, start: float, end: float, num_steps: int) -> float:
    """Value `step` of `num_steps` evenly spaced ones from start to end, both included."""
    return start if num_steps < 2 else start + (end - start) * step / (num_steps - 1)


def cosine(step: int, start: float, end: float, num_steps: int) -> float:
    """Half a cosine from start toward an end that is not quite reached."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * step / num_steps))


def warmup_cosine(
    step: int, peak: float, end: float, warmup_steps: int, num_steps: int, *, peak_once: bool = False
) -> float:
    """Linear from 0 to the peak, then a cosine that starts at the peak (again, unless `peak_once`)."""
    if step < warmup_steps:
        return linear(step, 0.0, peak, warmup_steps + peak_once)
    return cosine(step - warmup_steps, peak, end, num_steps - warmup_steps)


def warmup_linear(step: int, start: float, end: float, warmup_steps: int) -> float:
    """Linear over the warm-up, then constant."""
    return linear(step, start, end, warmup_steps) if step < warmup_steps else end


@dataclass(frozen=True)
class Length:
    """How long a run is: given in epochs, or in steps, of which warm-ups are then fixed shares."""

    num_steps: int
    steps_per_epoch: int
    in_epochs: bool = True

    def warmup(self, epochs: int, share: float) -> int:
        """Steps of a warm-up of this many epochs, or of this share of a run that is given in steps."""
        return epochs * self.steps_per_epoch if self.in_epochs else round(share * self.num_steps)
