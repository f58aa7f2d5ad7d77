# SPDX-License-Identifier: Apache-2.0
"""The torch operators tessera::* are there as soon as both torch and tessera are imported, in either order: programs
that torch.export saved, or that were compiled ahead of time, call them by name. torch is not imported for that.
"""

import contextlib
import importlib
import importlib.abc
import sys


def register_with_torch() -> None:
    """At once where torch is there, else when it comes."""
    if "torch" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WhenTorchComes())


def _register() -> None:
    with contextlib.suppress(ImportError):  # of a torch that is too old: the first use of a layer raises
        importlib.import_module("tessera.ops")


class _WhenTorchComes(importlib.abc.MetaPathFinder):
    """Finds torch as the other finders do, and has its loader register the operators once torch is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        specs = (find(name, path, target) for find in finders if find is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._then_register(spec.loader.exec_module)
        return spec

    def _then_register(self, load):
        def exec_module(module) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register()
        return exec_module
