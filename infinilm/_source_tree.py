"""Lets `import infinilm` work in a checkout, whose folder of this name comes before the installed package.

A source tree has no compiled core. Where the package is installed as well, that one takes its place, whole, so that
files of two versions never meet. `__init__.py` imports this in a source tree only, as the last thing it does.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec

__version__ = "0+source"


def _find_installed() -> ModuleSpec | None:
    """The first package of this name on the path that is no source tree."""
    for entry in sys.path:
        package = PathFinder.find_spec("infinilm", [entry])
        if package and PathFinder.find_spec("infinilm._version", package.submodule_search_locations):
            return package
    return None


if (found := _find_installed()) and found.loader:
    for name in [name for name in sys.modules if name.startswith("infinilm.") and name != __name__]:
        del sys.modules[name]  # infinilm.errors
    module = module_from_spec(found)
    sys.modules["infinilm"] = module  # which the import statement takes its result from
    found.loader.exec_module(module)
    __version__ = module.__version__
