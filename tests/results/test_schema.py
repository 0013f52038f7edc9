"""Result files are valid by the JSON Schema that the documentation shows of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fixtures import report_results

from draftkit.results.record import result_from

sys.path.append(str(Path(__file__).parents[2] / "docs"))
from result_schema import result_schema

RESULTS = {
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
