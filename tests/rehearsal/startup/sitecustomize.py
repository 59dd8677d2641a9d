"""Python imports this file at its start where its folder is on PYTHONPATH, see `rehearsal.gpu`.

Processes without torch start as ever.
"""

from types import ModuleType

from wrapt import register_post_import_hook


def _pretend(torch: ModuleType) -> None:
    from tests.rehearsal import gpu

    gpu.pretend()


register_post_import_hook(_pretend, "torch")
