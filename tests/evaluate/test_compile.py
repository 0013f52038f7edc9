"""`--compile`, where rounds are compiled and where they are not."""

from __future__ import annotations

import pytest

from draftkit.errors import DraftkitError
from draftkit.evaluate.engines import own
from draftkit.results.cell import Heading
from draftkit.results.settings import Settings


def test_a_gpu_has_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "device_named", lambda _: "cuda:0")
    with pytest.raises(DraftkitError, match="on a CPU alone") as refused:
        own._check_compiled(Settings(compile=True))
    assert "--compile" in str(refused.value)


@pytest.mark.parametrize(("engine", "compiled"), [("draftkit", True), ("vllm", None)])
def test_a_cell_says_that_rounds_were_compiled(engine: str, compiled: bool | None) -> None:
    heading = Heading.of(Settings(compile=True), engine=engine, target="a", draft="b")
    assert heading.compiled is compiled
    assert Heading.of(Settings(), engine=engine, target="a", draft="b").compiled is None
    assert (", compiled" in heading.name) == bool(compiled)
