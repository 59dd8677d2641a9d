"""Which executor runs the steps of a policy's plans."""

from __future__ import annotations

from megapack.base.choices import Executor, ExecutorChoice
from megapack.errors import ConfigError
from megapack.policy import Policy


def choose_executor(policy: Policy, choice: ExecutorChoice = "auto") -> Executor:
    """The executor of `ScheduleAdapter`: a given one, or the one that the policy needs.

    Where samples may be in pieces or backwards split, steps have orders of their own, which
    Megatron's schedules do not run.

    Raises:
        ConfigError: Megatron's schedules are asked for, and the policy may make such steps.

    >>> choose_executor(Policy(backward="split"))
    'operations'
    """
    settings = {
        "split_samples=auto": policy.split_samples == "auto",
        "backward=split": policy.backward == "split",
    }
    needs = [name for name, is_set in settings.items() if is_set]
    if choice == "megatron" and needs:
        raise ConfigError(
            f"executor=megatron with {' and '.join(needs)}: Megatron's schedules run no order but "
            "their own; set executor=auto, or split_samples=off and backward=joint"
        )
    if choice != "auto":
        return choice
    return "operations" if needs else "megatron"
