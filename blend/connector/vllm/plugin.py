"""Finding the model that vLLM runs, whatever its class.

vLLM hands a connector the attention layers, but not the model around them. The entry point ``vllm.general_plugins``
has vLLM call :func:`register` in every process before it builds a model; from then on torch's own hook for newly
registered submodules notes each module's parent, and the model is where the way up from an attention layer ends. No
class is replaced or subclassed, so this holds for every architecture and every way of loading it.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

_parents: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()
_registered = False


def register() -> None:
    """Begin to note the parents of modules. Safe to call again."""
    global _registered
    if not _registered:
        _registered = True
        register_module_module_registration_hook(_note)


def root_of(module: nn.Module) -> nn.Module:
    """Return the outermost module that ``module`` was registered in since :func:`register`; itself if in none."""
    while (parent := _parents.get(module)) is not None and (outer := parent()) is not None:
        module = outer
    return module


def _note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is not None:
        _parents[child] = ref(parent)
