"""`attnreg explain`: which backend would run a call, on this machine or on a simulated device."""

from typing import TYPE_CHECKING, Annotated

import typer

from attnreg.cli.errors import FAILED, import_torch
from attnreg.cli.options import AsJson, Causal, Deterministic, ValueDim, Varlen, Window, names, spec_of
from attnreg.cli.output import print_json

if TYPE_CHECKING:
    from attnreg.contract.spec import AttentionSpec
    from attnreg.explanation import Explanation

Query = Annotated[
    str,
    typer.Option(
        "--q", metavar="B,S,H,D", help="Query: batch, length (--varlen: the longest), heads, head dim."
    ),
]
Key = Annotated[str, typer.Option("--kv", metavar="B,S,H,D", help="Key and value. Default: as --q.")]
Where = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="cpu, cuda, cuda:1, or a simulated sm_90. Default: this machine's."
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="bf16, fp16, fp32, fp64, or torch's name.")
]
Backward = Annotated[bool, typer.Option("--backward", help="The call needs gradients.")]
TokensQ = Annotated[
    int,
    typer.Option(
        "--tokens-q",
        metavar="N",
        show_default=False,
        help="With --varlen: query tokens in total. Default: batch x length.",
    ),
]
TokensK = Annotated[
    int,
    typer.Option(
        "--tokens-k",
        metavar="N",
        show_default=False,
        help="With --varlen: key tokens in total. Default: batch x length.",
    ),
]
Scale = Annotated[float | None, typer.Option("--scale", metavar="X", help="Softmax scale.")]
Dropout = Annotated[
    float, typer.Option("--dropout", metavar="P", show_default=False, help="Dropout probability.")
]
Bias = Annotated[bool, typer.Option("--bias", help="With an attn_mask or bias tensor.")]
Alibi = Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes.")]
Paged = Annotated[
    int | None, typer.Option("--paged", metavar="N", min=1, help="Paged key-value cache, N tokens a page.")
]
SequsedK = Annotated[
    bool, typer.Option("--seqused-k", help="With seqused_k: the number of keys of each sequence.")
]
NumSplits = Annotated[
    int | None, typer.Option("--num-splits", metavar="N", help="Split the keys into N parts (split-KV).")
]
Capture = Annotated[bool, typer.Option("--capture", help="Inside a CUDA graph capture.")]
Only = Annotated[
    str, typer.Option("--backend", metavar="NAME", help="As with backend= on the call: this one or an error.")
]
Prefer = Annotated[
    list[str],
    typer.Option("--prefer", metavar="NAMES", help="As inside use_backend(...): one or several with commas."),
]


def explain(
    q: Query,
    kv: Key = "",
    device: Where = "",
    dtype: Dtype = "bf16",
    causal: Causal = False,
    window: Window = "-1,-1",
    backward: Backward = False,
    varlen: Varlen = False,
    tokens_q: TokensQ = -1,
    tokens_k: TokensK = -1,
    head_dim_v: ValueDim = None,
    scale: Scale = None,
    dropout: Dropout = 0.0,
    bias: Bias = False,
    alibi: Alibi = False,
    paged: Paged = None,
    seqused_k: SequsedK = False,
    num_splits: NumSplits = None,
    deterministic: Deterministic = False,
    capture: Capture = False,
    backend: Only = "",
    prefer: Prefer = [],  # noqa: B006 - typer makes a new list for each call
    as_json: AsJson = False,
) -> None:
    """Say which backend would run a call, and why.

    Every other backend is listed with all reasons why it can't run the call. Nothing is run, so the
    device may be one that this machine doesn't have.

    Example: attnreg explain --q 2,4096,32,128 --device sm_90 --causal
    """
    import_torch()
    spec = spec_of(
        q, kv or q, device, dtype, window, causal, head_dim_v, varlen=varlen, tokens_q=tokens_q,
        tokens_k=tokens_k, dropout=dropout, bias=bias, alibi=alibi, page_size=paged, seqused_k=seqused_k,
        num_splits=num_splits, needs_backward=backward, deterministic=deterministic, capturing=capture,
        positive_scale=scale is None or scale > 0.0,
    )  # fmt: skip
    _report(_explained(spec, backend, names("--prefer", prefer)), as_json)


def _report(found: "Explanation", as_json: bool) -> None:
    if as_json:
        print_json({"runs": found.runs, "backend": found.backend, "source": found.source, **found.to_dict()})
    else:
        typer.echo(str(found))
    if not found.runs:
        raise typer.Exit(FAILED)


def _explained(spec: "AttentionSpec", only: str, preferred: tuple[str, ...]) -> "Explanation":
    """Explain a call as if it was made with `backend=` or inside `use_backend`.

    Those two would load the backends. Here they need not load, so that a call on another machine can be
    explained.
    """
    from attnreg import _registry, explanation
    from attnreg.dispatch import scope
    from attnreg.selection.decision import Preference

    named = (only,) if only else preferred
    found = tuple(_registry.find(name).name for name in named)
    if not found:
        return explanation.explain(spec)
    source = f"{'--backend' if only else '--prefer'} {','.join(found)}"
    token = scope.enter(scope.make_choice(Preference(source, found, exclusive=bool(only))))
    try:
        return explanation.explain(spec)
    finally:
        scope.leave(token)
