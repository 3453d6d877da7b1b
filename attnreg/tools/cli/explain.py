"""`attnreg explain`: which backend would run a call, on this machine or on a simulated device."""

import math
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from attnreg.errors import InvalidInputError
from attnreg.tools.cli import options
from attnreg.tools.cli.options import valued
from attnreg.tools.cli.output import FAILED, import_torch, print_json

if TYPE_CHECKING:
    from attnreg.core.contract.spec import AttentionSpec
    from attnreg.tools.explanation import Explanation


def explain(
    q: Annotated[
        str, valued("--q", "B,S,H,D", "Query: batch, length (--varlen: the longest), heads, head dim.")
    ],
    kv: Annotated[str, valued("--kv", "B,S,H,D", "Key and value. Default: as --q.")] = "",
    device: Annotated[
        str, valued("--device", "DEVICE", "cpu, cuda, cuda:1, or a simulated sm_90. Default: this machine's.")
    ] = "",
    dtype: Annotated[
        str, valued("--dtype", "DTYPE", "bf16, fp16, fp32, fp64, or torch's name.", show_default=True)
    ] = "bf16",
    causal: options.Causal = False,
    window: options.Window = "-1,-1",
    backward: Annotated[bool, typer.Option("--backward", help="The call needs gradients.")] = False,
    varlen: options.Varlen = False,
    tokens_q: Annotated[
        int | None,
        valued("--tokens-q", "N", "With --varlen: query tokens in total. Default: batch x length.", min=0),
    ] = None,
    tokens_k: Annotated[
        int | None,
        valued("--tokens-k", "N", "With --varlen: key tokens in total. Default: batch x length.", min=0),
    ] = None,
    head_dim_v: options.ValueDim = None,
    scale: Annotated[float | None, valued("--scale", "X", "Softmax scale.")] = None,
    dropout: Annotated[float, valued("--dropout", "P", "Dropout probability.")] = 0.0,
    bias: Annotated[bool, typer.Option("--bias", help="With an attn_mask or bias tensor.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes.")] = False,
    paged: options.Paged = None,
    seqused_k: options.CountedKeys = False,
    key_ranges: Annotated[
        int, valued("--key-ranges", "N", "With key_ranges: N ranges of keys that each query sees.", min=0)
    ] = 0,
    score_mod: Annotated[
        bool, typer.Option("--score-mod", help="With score_mod: a function of each score.")
    ] = False,
    mask_mod: Annotated[
        bool, typer.Option("--mask-mod", help="With mask_mod: a function that hides scores.")
    ] = False,
    num_splits: Annotated[
        int | None, valued("--num-splits", "N", "Split the keys into N parts (split-KV).")
    ] = None,
    softcap: Annotated[float, valued("--softcap", "X", "Bound on the scores; 0 for none.")] = 0.0,
    grad_lse: Annotated[
        bool, typer.Option("--grad-lse", help="--backward, with a gradient of the LSE, too.")
    ] = False,
    sinks: options.Sinks = False,
    option: options.Further = [],  # noqa: B006 - typer makes a new list for each call
    deterministic: options.Deterministic = False,
    capture: Annotated[bool, typer.Option("--capture", help="Inside a CUDA graph capture.")] = False,
    backend: Annotated[
        str, valued("--backend", "NAME", "As with backend= on the call: this one or an error.")
    ] = "",
    prefer: Annotated[
        list[str], valued("--prefer", "NAMES", "As inside use_backend(...): one or several with commas.")
    ] = [],  # noqa: B006 - typer makes a new list for each call
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Say which backend would run a call, and why.

    The first line is the answer. Then each backend of the device has a line: whether it could run the call,
    and if not, why. Nothing is run, so the device may be one that this machine doesn't have.

    Example: attnreg explain --q 2,4096,32,128 --device sm_90 --causal
    """
    import_torch()
    from attnreg.core.contract.spec import LEAST_SCALE
    from attnreg.tools.lines import width_of

    if scale is not None and not math.isfinite(scale):
        raise InvalidInputError(f"--scale: got {scale}, expected a finite number")
    for flag, tokens in (("--tokens-q", tokens_q), ("--tokens-k", tokens_k)):
        if tokens is not None and not varlen:
            raise InvalidInputError(
                f"{flag}: got no --varlen, expected it as well: of dense tensors it follows"
            )
    if backend and prefer:
        raise InvalidInputError(
            "--prefer: got --backend as well, expected one of them: --backend alone decides"
        )
    spec = options.spec_of(
        q, kv or q, device, dtype, window, causal, head_dim_v, varlen=varlen,
        tokens_q=-1 if tokens_q is None else tokens_q, tokens_k=-1 if tokens_k is None else tokens_k,
        dropout=dropout, bias=bias, alibi=alibi, page_size=paged, seqused_k=seqused_k,
        key_ranges=bool(key_ranges), ranges=key_ranges, score_mod=score_mod, mask_mod=mask_mod,
        num_splits=num_splits, softcap=softcap, grad_lse=grad_lse, sinks=sinks,
        needs_backward=backward or grad_lse, deterministic=deterministic, capturing=capture,
        positive_scale=scale is None or scale >= LEAST_SCALE,
    ).but(**options.further(option))  # fmt: skip
    explanation = _explained(spec, backend, options.names("--prefer", prefer))
    if as_json:
        print_json(explanation.to_dict())
    else:
        typer.echo(explanation.text(verbose, width_of(sys.stdout)))
    if not explanation.runs:
        raise typer.Exit(FAILED)


def _explained(spec: "AttentionSpec", only: str, preferred: tuple[str, ...]) -> "Explanation":
    """Explain a call as with `backend=` or inside `use_backend`, except that the backends need not load."""
    from attnreg.core import registry
    from attnreg.core.selection.decision import Preference
    from attnreg.tools import explanation

    backends = tuple(registry.find(name).name for name in ((only,) if only else preferred))
    if not backends:
        return explanation.explain(spec)
    source = f"{'--backend' if only else '--prefer'} {','.join(backends)}"
    return explanation.explain_spec(spec, Preference(source, backends, exclusive=bool(only)))
