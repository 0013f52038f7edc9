"""The JSON Schema of result files: the package's file is that of the types, and result files are valid by it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fixtures import report_results

from draftkit.results import schema
from draftkit.results.record import result_from
from draftkit.results.schema import result_schema

FILE = Path(schema.__file__).with_name("result.schema.json")
FIRST = Path(__file__).parents[1] / "fixtures" / "result_schema_1.json"


def test_the_file_in_the_package_is_that_of_the_types() -> None:
    """`DRAFTKIT_GOLDEN=write` writes it anew."""
    if os.environ.get("DRAFTKIT_GOLDEN") == "write":
        FILE.write_text(json.dumps(result_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    assert json.loads(FILE.read_text(encoding="utf-8")) == result_schema()


RESULTS = {
    "first version": json.loads(FIRST.read_text(encoding="utf-8")),
    "full": report_results.full_result(),
    "old": report_results.old_result(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_valid_as_read_and_as_written(name: str) -> None:
    jsonschema.validate(RESULTS[name], result_schema())
    again = result_from(RESULTS[name], Path("result.json")).to_dict()
    jsonschema.validate(json.loads(json.dumps(again)), result_schema())


@pytest.mark.parametrize(
    ("edit", "where"),
    [({"schema": 2}, "schema"), ({"cells": [{"target": "t"}]}, "draft"), ({"cells": 3}, "array")],
)
def test_what_is_not_a_result_is_not_valid(edit: dict[str, Any], where: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=where):
        jsonschema.validate(report_results.full_result() | edit, result_schema())
