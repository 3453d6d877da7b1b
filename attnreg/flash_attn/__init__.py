"""flash-attn's functions on every device, by the backends of attnreg: replace the import, nothing else.

    from attnreg.flash_attn import flash_attn_func, flash_attn_varlen_func

Names, arguments, defaults, layouts and results are those of flash-attn 2.8. May import `varlen` and all below
it. Read `functions` first; `attention` has what they share, `dropped_weights` shows what dropout has dropped,
`kvcache` decodes with a cache, `bert_padding` takes padding out and puts it back, `rotary` rotates heads by
their positions, and `activation` puts all of it under the name `flash_attn`.
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
