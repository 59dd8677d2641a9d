"""Which optimizer a config asks Megatron-Core for, and what refuses it."""

from __future__ import annotations

import pytest

from megapack.errors import ConfigError
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt.optimizer import check_optimizer
from megapack.model.head import ValueHead
from tests.marks import needs_muon
from tests.megatron import NO_MUON

pytestmark = pytest.mark.unit


@pytest.mark.skipif(not NO_MUON, reason="Muon is installed")
def test_muon_is_refused_in_one_line_where_it_is_absent() -> None:
    check_optimizer(OptimConfig())
    with pytest.raises(ConfigError, match=r"optim\.name=muon needs .* set optim\.name=adam") as no:
        check_optimizer(OptimConfig(name="muon"))
    assert "\n" not in str(no.value)


@needs_muon
def test_a_value_head_is_for_adam_as_the_output_layer_is() -> None:
    from megatron.core.optimizer.emerging_optimizers import _is_nonlinear_or_embedding

    check_optimizer(OptimConfig(name="muon"))
    head = ValueHead(16)
    assert head.weight.dim() == 2
    assert _is_nonlinear_or_embedding(head.weight)
