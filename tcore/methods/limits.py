"""Kinds of settings: what a value must satisfy, and the error text; no torch, no other room."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple


class Limit(NamedTuple):
    """What a value must satisfy, and the error text where it does not."""

    holds: Callable[[Any], bool]
    need: str


Count = Annotated[int, Limit(lambda x: x >= 1, "need 1 or more")]
AtLeastZero = Annotated[int, Limit(lambda x: x >= 0, "need 0 or more")]
Weight = Annotated[float, Limit(lambda x: x >= 0, "need 0 or more")]
Positive = Annotated[float, Limit(lambda x: x > 0, "need a value above 0")]
Share = Annotated[float, Limit(lambda x: 0 <= x <= 1, "need a value from 0 to 1")]
Range = tuple[float, float]
Shares = Annotated[Range, Limit(lambda x: 0 <= x[0] <= x[1] <= 1, "need two rising values from 0 to 1")]
Stretch = Annotated[Range, Limit(lambda x: 0 <= x[0] < x[1] <= 1, "need two rising values from 0 to 1")]
Areas = Annotated[Range, Limit(lambda x: 0 < x[0] <= x[1] <= 1, "need two rising values above 0 and up to 1")]
Seconds = Annotated[Range, Limit(lambda x: 0 < x[0] <= x[1], "need two rising values above 0")]
Momenta = Annotated[Range, Limit(lambda x: all(0 <= m <= 1 for m in x), "need two values from 0 to 1")]
Weights = Annotated[Range, Limit(lambda x: min(x) >= 0, "need two values of 0 or more")]
Temperatures = Annotated[Range, Limit(lambda x: min(x) > 0, "need two values above 0")]
TwoOrMore = Annotated[int, Limit(lambda x: x >= 2, "need 2 or more")]
Cuts = Literal["ignore", "split"]
