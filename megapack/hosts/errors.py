"""What host modules raise where their hosts assert."""

from megapack.errors import PlanError


class HostAssertionError(PlanError, AssertionError):
    """A refusal that a host makes with a bare assertion, so that handlers of either kind see it."""
