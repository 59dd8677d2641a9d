"""The loops that the documents show run as they stand."""

from __future__ import annotations

import pytest

from tests.dist.spawn import checked_job
from tests.documents import python_blocks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("document", ["README.md", "docs/quick_start.md"])
def test_the_blocks_of_a_document_run(document: str) -> None:
    assert python_blocks(document)
    output = checked_job(4, "tests.dist.documents_worker", [document], timeout_s=200)
    assert output.count("the loss is finite: True") == 4
