"""/openapi.json against the real server: the document is valid, and what it says of requests and answers holds."""

import collections
import json
import urllib.request

import hypothesis
import pytest
import schemathesis
from openapi_spec_validator import validate
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

# Generated requests per endpoint; the same ones in every run.
EXAMPLES = 40
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def document(servers):
    with urllib.request.urlopen(f"{servers('chain_tools', 1).origin}/openapi.json", timeout=10) as answer:
        return json.load(answer)


def test_the_document_is_valid(document):
    validate(document)


def test_every_endpoint_is_described(servers, document):
    with urllib.request.urlopen(f"{servers('chain_tools', 1).origin}/", timeout=10) as answer:
        listed = json.load(answer)["endpoints"]
    assert set(listed) <= set(document["paths"])


def short(case):
    """Keeps answers short; the model is slow and never stops at some prompts."""
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"):
            if type(case.body.get(name)) is int and case.body[name] > 4:
                case.body[name] = 4
    return case


def plainly_wrong(case):
    """The server reads a number that is one rounding step beyond a bound as the bound."""
    if isinstance(case.body, dict):
        for name, value in case.body.items():
            if type(value) is float and 0 < abs(value - round(value)) < 1e-9:
                case.body[name] = value + 0.001
    return case


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_requests_and_answers_are_as_described(servers, document, mode):
    server = servers("chain_tools", 1)
    statuses = collections.Counter()
    for operation in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = operation.ok()
        takes_body = "requestBody" in document["paths"][operation.path][operation.method]
        # Without a body there is nothing to be wrong: no endpoint reads a query, and any string may be a model's id.
        if mode == GenerationMode.NEGATIVE and not takes_body:
            continue
        prepare = short if mode == GenerationMode.POSITIVE else plainly_wrong

        @hypothesis.settings(
            max_examples=EXAMPLES, derandomize=True, database=None, deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def run(case):
            answer = prepare(case).call_and_validate(base_url=server.origin, checks=CHECKS, timeout=60)
            statuses[answer.status_code] += 1

        run()
    # What fits the schemas is answered often enough for the check to mean something; what does not never is.
    assert (statuses[200] > EXAMPLES) == (mode == GenerationMode.POSITIVE), statuses
    answer = server.client.completions.create(model=server.model, prompt="A", temperature=0)
    assert answer.choices[0].text == " alpha beta gamma delta"
