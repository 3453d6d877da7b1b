"""What `import torch` calls through its entry point `torch.backends`: attnreg for untouched programs.

With none of attnreg's variables set this has to cost nothing: it looks at the environment, gives
torch's registry the name "attnreg", and imports nothing else.
"""

from __future__ import annotations

import os
import sys
import warnings

__all__ = ["activate", "offer"]


def activate() -> None:
    """Install the routers if the environment asks for something; never an error of `import torch`."""
    offer()
    if not any(name.startswith("ATTNREG_") and value.strip() for name, value in os.environ.items()):
        return
    from attnreg import aten, policy
    from attnreg.errors import AttnregError

    try:
        aten.ensure()
        policy.current()
    except AttnregError as error:
        warnings.warn(
            f"attnreg: {error}\nEvery attention call that this would have governed will raise it.",
            stacklevel=2,
        )
    except Exception as error:  # noqa: BLE001 - `import torch` must not fail because of attnreg
        warnings.warn(f"attnreg is not active: {type(error).__name__}: {error}", stacklevel=2)


def offer() -> None:
    """Make "attnreg" a name that `torch.nn.attention.activate_flash_attention_impl` knows."""
    registry = sys.modules.get("torch.nn.attention._registry")
    if registry is not None:
        registry.register_flash_attention_impl("attnreg", register_fn=_activated_by_torch)


class _TorchHandle:
    """What torch's registry keeps while "attnreg" is its active implementation."""

    def __init__(self, installed_before: bool) -> None:
        self._installed_before = installed_before

    def remove(self) -> None:
        """Leave things as `activate_flash_attention_impl` found them."""
        from attnreg import api, policy

        if self._installed_before:
            policy.activate(False)
        else:
            api.uninstall()


def _activated_by_torch() -> _TorchHandle:
    from attnreg import api, aten

    before = aten.installed()
    api.install()
    return _TorchHandle(before)
