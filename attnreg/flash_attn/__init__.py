"""flash-attn's functions on every device, by the backends of attnreg: replace the import, nothing else.

    from attnreg.flash_attn import flash_attn_func, flash_attn_varlen_func

Names, arguments, defaults, layouts and results are as in flash-attn 2.8. Here, module by module:
- `functions`, to be read first: the functions without a cache. `attention` has their common part.
- `dropped_weights`: the weights that dropout has dropped.
- `kvcache`, `kvcache_checks`: decoding with a cache.
- `bert_padding`: removes padding and restores it.
- `rotary`: rotates heads by their positions.
- `directions`: a forward or a backward alone, without autograd.
- `private`: the names that programs import beside the public ones.
- `activation`: makes all of it importable as `flash_attn`.

May import `varlen` and all below it.
"""

from attnreg.flash_attn import bert_padding
from attnreg.flash_attn.activation import activate, deactivate
from attnreg.flash_attn.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from attnreg.flash_attn.kvcache import flash_attn_with_kvcache

__all__ = [
    "activate",
    "bert_padding",
    "deactivate",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
