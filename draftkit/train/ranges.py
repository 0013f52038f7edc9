"""What the numbers among the settings may be, so that a run that cannot work is refused before anything is loaded."""

from __future__ import annotations

from typing import Annotated

from draftkit.io.records import Bounds
from draftkit.layout.architecture import MAX_REPEATS, MAX_SIZE

Share = Annotated[float, Bounds(least=0, most=1)]
ProperShare = Annotated[float, Bounds(least=0, below=1)]
Finite = Annotated[float, Bounds()]
Weight = Annotated[float, Bounds(least=0)]
Positive = Annotated[float, Bounds(above=0)]
Size = Annotated[int, Bounds(least=1, most=MAX_SIZE)]
SizeOrNone = Annotated[int, Bounds(least=0, most=MAX_SIZE)]  # 0: none of it, or the default
Index = SizeOrNone
Repeats = Annotated[int, Bounds(least=1, most=MAX_REPEATS)]  # of a layer, head or step
RepeatsOrDefault = Annotated[int, Bounds(least=0, most=MAX_REPEATS)]
Seed = Annotated[int, Bounds(least=0, below=2**32)]  # what numpy takes
