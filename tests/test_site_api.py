"""The JSON interface against its OpenAPI description: generated requests, right and wrong ones."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from site_tools import everything

from kvattn.site.server import application

APP = application(everything())

description = schemathesis.openapi.from_asgi("/openapi.json", APP)


FEW = settings(max_examples=25, stateful_step_count=4, suppress_health_check=list(HealthCheck))


@description.parametrize()
@FEW
def test_answers_are_as_described(case: Case[Any]) -> None:
    """Status, content type, headers and body of every answer; 405 for methods that are none."""
    case.call_and_validate()


Sequences = description.as_state_machine()
TestSequences = Sequences.TestCase  # follows the links: a search, then an error that it found
TestSequences.settings = FEW
